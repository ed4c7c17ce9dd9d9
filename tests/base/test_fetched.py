"""What was fetched from S3 stays within a limit, and nothing goes that anybody uses."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from refit import fetched, s3_objects
from refit.errors import BadInput, DiskFull, StoreUnavailable
from refit.manifest import Manifest
from refit.store import join, store_for
from refit.store_s3 import S3Store

KIB = 1 << 10
USE = """
import sys
from refit.store import store_for
print(store_for(sys.argv[1]).local(sys.argv[1]), flush=True)
input()
"""


@pytest.fixture
def root(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An address on S3; some 250 KiB of what comes from there may stay on this machine."""
    monkeypatch.setenv("REFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(fetched.LIMIT, str(250 * KIB / (1 << 30)))
    return join(s3, tmp_path.name)


def publish(root: str, name: str) -> str:
    """A committed folder of 100 KiB."""
    uri = join(root, name)
    with store_for(uri).publish(uri) as draft:
        (draft.path / "weights").write_bytes(name.encode() * (100 * KIB // len(name)))
        draft.commit(Manifest(kind="thing", fingerprint=name))
    return uri


def fetch(uri: str, at: int | None = None) -> Path:
    """A copy that nobody holds any more, as a process leaves it that ends; `at` is when it was asked for."""
    path = store_for(uri).local(uri)
    fetched.let_go(path if path.is_dir() else path.parent)
    if at is not None:
        os.utime(path, (at, at))
    return path


def test_what_was_asked_for_longest_ago_makes_room(root: str) -> None:
    first, second, third = (publish(root, name) for name in ("a", "b", "c"))
    one, two = fetch(first, at=1000), fetch(second, at=2000)
    assert fetch(first) == one, "asked for again: now the other one is the older"
    three = fetch(third)
    assert [path.exists() for path in (one, two, three)] == [True, False, True]
    assert (fetch(second) / "weights").read_bytes().startswith(b"bbb"), "what went is fetched again"


def test_objects_count_and_go_too(root: str) -> None:
    for name in ("x", "y", "z"):
        store_for(root).write(join(root, name), name.encode() * (100 * KIB))
    one, two, three = (fetch(join(root, name)) for name in ("x", "y", "z"))
    assert [path.exists() for path in (one, two, three)] == [False, True, True]
    assert store_for(root).copy(join(root, "x")).path.read_bytes().startswith(b"xxx")


def test_what_this_process_was_given_stays(root: str) -> None:
    given = [store_for(uri).local(uri) for uri in (publish(root, name) for name in ("a", "b", "c", "d"))]
    assert all((path / "weights").is_file() for path in given), "more than the limit, and all of it in use"


def test_what_another_process_uses_stays_until_it_ends_however_it_ends(root: str) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", USE, publish(root, "a")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    used = Path(other.stdout.readline().strip())
    os.utime(used, (1000, 1000))
    for name in ("b", "c", "d"):
        fetch(publish(root, name))
        assert (used / "weights").is_file()
    other.send_signal(signal.SIGKILL)
    other.communicate()
    os.utime(used, (1000, 1000))
    fetch(publish(root, "e"))
    assert not used.exists()


@contextmanager
def few_descriptors(more: int) -> Iterator[None]:
    """This process may open so many files more, or a few that are free in between."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(free := os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_more_objects_are_held_than_a_process_may_have_files_open(root: str) -> None:
    """A data stage with thousands of objects holds them all until it ends."""
    objects = [fetched.place() / "objects" / f"{number:032x}" for number in range(300)]
    with few_descriptors(20):
        for folder in objects:
            fetched.make(folder)
            (folder / "copy").write_bytes(bytes(KIB))
    fetched.make_room(200 * KIB)
    assert all((folder / "copy").is_file() for folder in objects)
    for folder in objects[:100]:
        fetched.let_go(folder)
    fetched.make_room(20 * KIB)
    assert [folder.exists() for folder in objects] == [False] * 70 + [True] * 230, "300 KiB were here, 250 may be"


def test_a_hold_that_fails_is_an_error_and_no_absence(root: str) -> None:
    """A loop that waits for the entry would never end."""
    path = fetched.place() / "objects" / ("a" * 32)
    fetched.make(path)
    with few_descriptors(0):
        for ask in (fetched.hold, fetched.make):
            with pytest.raises(OSError, match="Too many open files"):
                ask(path)
        with pytest.raises(OSError, match="Too many open files"):
            fetched.draft()


def test_what_stands_in_a_command_line_stays(root: str) -> None:
    """A model server lives on when the controller that fetched its model is started anew."""
    used = fetch(publish(root, "a"), at=1000)
    server = subprocess.Popen([sys.executable, "-c", "input()", "--model", str(used)], stdin=subprocess.PIPE)
    try:
        for name in ("b", "c"):
            fetch(publish(root, name))
        assert used.exists()
    finally:
        server.communicate(b"\n")
    fetch(publish(root, "d"))
    assert not used.exists()


def test_a_copy_that_is_going_is_not_given_to_anybody(root: str) -> None:
    """Between the look whether it is there and the hold: another process takes it away."""
    path = fetch(publish(root, "a"))
    descriptor = os.open(fetched.place(), os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(fetched.hold, path)
        while not any(line.split()[1] == "->" for line in Path("/proc/locks").read_text().splitlines()):
            assert not asked.done(), "it waits for who throws away"
        path.rename(path.with_name("elsewhere"))
        os.close(descriptor)
        assert not asked.result()
    assert (fetch(join(root, "a")) / "weights").is_file()


def test_a_copy_is_thrown_away_where_the_disk_has_no_room_though_the_limit_does(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fetch(publish(root, "a"))
    really = fetched.shutil.disk_usage(path)
    monkeypatch.setattr(fetched.shutil, "disk_usage", lambda _: really._replace(free=50 * KIB))
    fetch(publish(root, "b"))
    assert not path.exists()


def test_a_disk_that_is_full_is_told_with_what_to_do(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A traceback would be exit 1, which says nothing; and the store is well: it is not to be passed over."""
    folder, thing = publish(root, "a"), join(root, "x")
    store = store_for(thing)
    store.write(thing, b"x")

    def full(*_: object) -> None:
        Path("/dev/full").write_bytes(b"x")

    monkeypatch.setattr(S3Store, "_download", full)
    monkeypatch.setattr(s3_objects, "_transfer", full)
    for uri in (folder, thing):
        with pytest.raises(DiskFull, match=r"No space left.*Free room.*REFIT_CACHE_GIB") as told:
            store.local(uri)
        assert told.value.exit_code == 30
        assert not isinstance(told.value, StoreUnavailable)
    assert not list(fetched.place().glob(f"{fetched.DRAFT}*"))


def test_what_a_killed_fetch_left_goes_and_what_one_is_making_stays(root: str) -> None:
    left, fresh = (fetched.place() / f"{fetched.DRAFT}1-{name}" for name in ("old", "new"))
    making = fetched.draft()
    for folder in (left, fresh):
        folder.mkdir()
    for folder in (left, making):
        os.utime(folder, (1000, 1000))
    fetch(publish(root, "a"))
    assert [folder.exists() for folder in (left, fresh, making)] == [False, True, True]
    fetched.let_go(making)


@pytest.mark.parametrize("told", ["0", "-1", "much", "nan", "inf"])
def test_a_limit_that_is_none_is_named(root: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(fetched.LIMIT, told)
    with pytest.raises(BadInput, match=f"REFIT_CACHE_GIB is '{told}'"):
        fetch(publish(root, "a"))
