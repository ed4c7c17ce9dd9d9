"""The same promises on a disk and on S3."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from refit import fetched
from refit.errors import BadInput, Damaged, StoreUnavailable
from refit.manifest import Manifest, damage
from refit.store import FileStore, Store, join, matching, store_for
from refit.store_s3 import S3Store


@pytest.fixture(params=["file", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("REFIT_CACHE", str(tmp_path / "cache"))
    if request.param == "file":
        return f"file://{tmp_path}/store"
    return join(request.getfixturevalue("s3"), tmp_path.name)


def publish(store: Store, uri: str, content: str, fingerprint: str = "f") -> Manifest:
    with store.publish(uri) as draft:
        (draft.path / "deep").mkdir()
        (draft.path / "deep" / "x.txt").write_text(content)
        return draft.commit(Manifest(kind="thing", fingerprint=fingerprint))


def draft_fails(store: Store, uri: str) -> None:
    try:
        with store.publish(uri) as draft:
            (draft.path / "x").write_text("half")
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        return


def test_the_store_says_by_its_own_clock_when_a_file_was_written(root: str) -> None:
    store, uri = store_for(root), join(root, "clock/x")
    with pytest.raises(FileNotFoundError):
        store.modified(uri)
    before = time.time()
    store.write(uri, b"x")
    assert before - 1.1 <= store.modified(uri) <= time.time(), "S3 tells whole seconds"


def test_a_published_folder_comes_back_whole(root: str) -> None:
    store, uri = store_for(root), join(root, "things/a")
    assert store.manifest(uri) is None
    manifest = publish(store, uri, "hello")
    assert store.manifest(uri) == manifest
    folder = store.local(uri)
    assert (folder / "deep" / "x.txt").read_text() == "hello"
    assert damage(folder, manifest) == []
    assert store.children(join(root, "things")) == ["a"]
    assert store.require(uri, "thing") == manifest


def test_what_was_not_committed_does_not_exist(root: str) -> None:
    store, uri = store_for(root), join(root, "things/b")
    draft_fails(store, uri)
    assert store.manifest(uri) is None
    assert store.children(join(root, "things")) == []
    with pytest.raises(BadInput, match="no manifest"):
        store.require(uri, "thing")


def test_of_two_writers_the_first_stands_and_the_second_is_told(root: str) -> None:
    store, uri = store_for(root), join(root, "things/c")
    first = publish(store, uri, "first")
    second = publish(store, uri, "second")
    assert second == first
    assert (store.local(uri) / "deep" / "x.txt").read_text() == "first"


def test_folders_of_one_content_are_fetched_side_by_side(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One copy serves them all, and no fetch trips over another's."""
    monkeypatch.setenv("REFIT_CACHE", str(tmp_path / "cache"))
    uris = [join(s3, tmp_path.name, str(number)) for number in range(16)]
    for uri in uris:
        publish(store_for(uri), uri, "same")
    together = Barrier(len(uris))

    def fetch(uri: str) -> Path:
        store = store_for(uri)
        together.wait()
        return store.local(uri)

    with ThreadPoolExecutor(len(uris)) as pool:
        found = set(pool.map(fetch, uris))
    assert len(found) == 1
    assert (found.pop() / "deep" / "x.txt").read_text() == "same"
    assert len(list((tmp_path / "cache" / "fetched").rglob("x.txt"))) == 1


def test_create_is_a_fence(root: str) -> None:
    store, uri = store_for(root), join(root, "lock")
    assert store.create(uri, b"1")
    assert not store.create(uri, b"2")
    assert store.read(uri) == b"1"
    store.write(uri, b"3")
    assert store.read(uri) == b"3"
    with pytest.raises(FileNotFoundError):
        store.read(join(root, "nothing"))


def test_content_counts_and_time_does_not(root: str) -> None:
    store = store_for(root)
    same = publish(store, join(root, "x"), "same", "one").content_digest()
    assert publish(store, join(root, "y"), "same", "two").content_digest() == same
    assert publish(store, join(root, "z"), "other", "one").content_digest() != same


def test_junk_without_a_manifest_makes_room(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/a"
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "junk").write_text("killed half-way")
    publish(FileStore(), uri, "hello")
    assert not (tmp_path / "a" / "junk").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]


def test_damage_is_named(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/a"
    manifest = publish(FileStore(), uri, "hello")
    file = tmp_path / "a" / "deep" / "x.txt"
    file.write_text("hellO")
    assert damage(tmp_path / "a", manifest) == ["deep/x.txt differs from its hash"]
    file.write_text("hell")
    assert damage(tmp_path / "a", manifest, hashes=False) == ["deep/x.txt has 4 bytes, the manifest says 5"]
    file.unlink()
    assert damage(tmp_path / "a", manifest) == ["deep/x.txt is missing"]


def test_a_broken_manifest_is_an_error_not_an_absence(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(StoreUnavailable, match="cannot be read"):
        FileStore().manifest(f"file://{tmp_path}")


@pytest.mark.parametrize("uri", ["http://x/y", "file://host/x", "cache://../../etc/passwd"])
def test_addresses_that_lead_elsewhere_are_refused(uri: str) -> None:
    with pytest.raises(BadInput):
        store_for(uri).exists(uri)


def test_an_upload_that_s3_refuses_is_an_error_of_the_contract(s3: str) -> None:
    with pytest.raises(StoreUnavailable, match="NoSuchBucket"):
        publish(store_for(s3), "s3://no-such-bucket/a", "x")


def test_s3_notices_a_fetch_that_is_damaged(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFIT_CACHE", str(tmp_path))
    store, uri = store_for(s3), join(s3, "damaged")
    publish(store, uri, "hello")
    store.write(join(uri, "deep/x.txt"), b"hellO")
    with pytest.raises(StoreUnavailable, match="differs from its hash"):
        store.local(uri)


def flip(folder: Path) -> None:
    """Other bytes, as many: names and sizes are as they were."""
    (folder / "deep" / "x.txt").write_text("hellO")


@pytest.fixture
def fetched_copy(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Manifest, Path]:
    monkeypatch.setenv("REFIT_CACHE", str(tmp_path / "cache"))
    uri = join(s3, tmp_path.name)
    manifest = publish(store_for(uri), uri, "hello")
    return uri, manifest, store_for(uri).local(uri)


def test_a_copy_that_went_bad_here_is_fetched_once_more_before_the_store_is_judged(
    fetched_copy: tuple[str, Manifest, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut, or a disk: else this machine would take what is whole for damaged for good."""
    uri, manifest, copy = fetched_copy
    store = store_for(uri)
    flip(copy)
    assert store.judged(uri, manifest) == (copy, [])
    assert (copy / "deep" / "x.txt").read_text() == "hello"
    flip(copy)
    with monkeypatch.context() as away:
        away.setattr(S3Store, "_download", gone_away)
        with pytest.raises(StoreUnavailable, match="503") as told:
            store.judged(uri, manifest)
        assert not isinstance(told.value, Damaged), "an outage says nothing about what the store holds"
    flip(store.local(uri))
    store.write(join(uri, "deep/x.txt"), b"hellO")
    with pytest.raises(Damaged, match="differs from its hash"):
        store.judged(uri, manifest)


def gone_away(_: S3Store, uri: str, *__: object) -> None:
    raise StoreUnavailable(f"{uri}: 503")


def test_what_does_not_stay_whole_on_this_disk_is_no_damage_in_the_store(
    fetched_copy: tuple[str, Manifest, Path],
) -> None:
    uri, manifest, _ = fetched_copy
    with pytest.raises(StoreUnavailable, match="Look at this machine's disk") as told:
        store_for(uri).judged(uri, manifest, by=lambda *_: ["deep/x.txt differs from its hash"])
    assert not isinstance(told.value, Damaged)


def test_a_copy_that_another_process_has_just_mended_is_not_thrown_away(
    fetched_copy: tuple[str, Manifest, Path],
) -> None:
    uri, manifest, copy = fetched_copy
    seen = fetched.mark(copy)
    flip(copy)
    store_for(uri).judged(uri, manifest)
    mended = fetched.mark(copy)
    fetched.discard(copy, seen)
    assert fetched.mark(copy) == mended is not None


def test_what_is_fetched_is_on_the_disk_before_it_has_its_name(
    fetched_copy: tuple[str, Manifest, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut a name may be there without the bytes, at their full length."""
    uri, _, copy = fetched_copy
    fetched.discard(copy, fetched.mark(copy))
    synced: list[str] = []
    really = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        really(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    store_for(uri).local(uri)
    files = ["deep/x.txt", "manifest.json"]
    drafts = [name for name in synced if "/draft-" in name]
    assert [name for name in files if not any(one.endswith("/" + name) for one in drafts)] == []
    assert synced[-1] == str(copy.parent)


def test_what_was_removed_does_not_exist_and_can_be_made_again(root: str) -> None:
    store, uri = store_for(root), join(root, "things/a")
    publish(store, uri, "old")
    store.remove(uri)
    assert store.manifest(uri) is None
    publish(store, uri, "new")
    assert store.read(join(uri, "deep/x.txt")) == b"new"
    store.remove(join(root, "things/never"))


def test_a_glance_reads_no_more_than_it_needs(root: str) -> None:
    store, uri = store_for(root), join(root, "in/a.jsonl")
    store.write(uri, b"0123456789")
    assert store.read(uri, first=4) == b"0123"
    assert store.read(uri, first=40) == store.read(uri) == b"0123456789"
    store.write(join(root, "in/empty"), b"")
    assert store.read(join(root, "in/empty"), first=4) == b""


def test_a_pattern_in_the_last_part_names_what_matches_in_order(root: str) -> None:
    store = store_for(root)
    for name in ("part-2.jsonl", "part-1.jsonl", "notes.txt", "part-3.jsonl.gz"):
        store.write(join(root, "in", name), b"x")
    assert matching(join(root, "in/part-*.jsonl")) == [join(root, f"in/part-{number}.jsonl") for number in (1, 2)]
    assert matching(join(root, "in/part-[12].jsonl")) == matching(join(root, "in/part-?.jsonl"))
    assert matching(join(root, "in/none-*")) == matching(join(root, "nowhere/*.jsonl")) == []
    assert matching(join(root, "in/notes.txt")) == [join(root, "in/notes.txt")]
