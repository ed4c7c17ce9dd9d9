"""Process identity and the end of whole trees, with real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from refit.proc import Identity, alive, descendants, find_tagged, kill_tree, spawn

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]

LAUNCHER = """
import subprocess, sys, time
rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(rank.pid, flush=True)
time.sleep(600)
"""
"""Starts a child in a session of its own, as torchrun does."""


@pytest.fixture
def tag() -> Iterator[str]:
    mark = str(uuid.uuid4())
    yield mark
    kill_tree(None, grace=0, tag=mark)


def until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def launcher_with_rank(tag: str) -> tuple[subprocess.Popen[bytes], Identity, Identity]:
    launcher = spawn([sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE, tag=tag)
    assert launcher.stdout is not None
    return launcher, Identity.of(launcher.pid), Identity.of(int(launcher.stdout.readline()))


def test_an_identity_survives_a_round_trip_through_json(tag: str) -> None:
    child = spawn(SLEEP, tag=tag)
    identity = Identity.of(child.pid)
    assert Identity.from_json(json.loads(json.dumps(identity.to_json()))) == identity
    assert alive(identity)


def test_a_pid_that_was_used_again_or_another_boot_is_not_the_same_process() -> None:
    us = Identity.of(os.getpid())
    assert alive(us)
    assert not alive(replace(us, started=us.started - 1))
    assert not alive(replace(us, boot="another"))


def test_an_ended_child_is_not_alive_even_before_its_parent_looks(tag: str) -> None:
    child = spawn(SLEEP, tag=tag)
    identity = Identity.of(child.pid)
    os.kill(child.pid, signal.SIGKILL)
    assert until(lambda: not alive(identity))
    assert Path(f"/proc/{child.pid}").exists(), "it should still be a zombie here"
    assert child.wait() == -signal.SIGKILL


def test_no_identity_for_a_process_that_does_not_exist(tag: str) -> None:
    child = spawn(["true"], tag=tag)
    child.wait()
    with pytest.raises(ProcessLookupError, match=str(child.pid)):
        Identity.of(child.pid)


def test_a_spawned_program_leads_its_own_session_and_reads_its_environment(tag: str, tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as out:
        show = "import os; print(os.getsid(0) == os.getpid(), os.environ['COLOUR'], os.getcwd())"
        child = spawn([sys.executable, "-c", show], env={"COLOUR": "blue"}, cwd=tmp_path, stdout=out, tag=tag)
    assert child.wait() == 0
    assert (tmp_path / "out").read_text().split() == ["True", "blue", str(tmp_path)]


def test_descendants_include_a_child_in_another_session(tag: str) -> None:
    launcher, root, rank = launcher_with_rank(tag)
    assert descendants(root) == [rank]
    kill_tree(root, tag=tag)
    launcher.wait()
    assert descendants(root) == []


def test_the_tag_is_found_on_children_and_not_on_strangers(tag: str) -> None:
    stranger = spawn(SLEEP, tag=tag + "0")
    try:
        _, root, rank = launcher_with_rank(tag)
        assert set(find_tagged(tag)) == {root, rank}
    finally:
        stranger.kill()
        stranger.wait()


def test_killing_a_tree_takes_the_ranks_in_their_own_sessions_with_it(tag: str) -> None:
    launcher, root, rank = launcher_with_rank(tag)
    assert set(kill_tree(root, grace=5)) == {root, rank}
    assert not alive(root)
    assert not alive(rank)
    assert launcher.wait() == -signal.SIGTERM


def test_an_orphan_is_found_by_its_tag_after_its_launcher_was_killed(tag: str) -> None:
    launcher, root, rank = launcher_with_rank(tag)
    launcher.kill()
    launcher.wait()
    assert alive(rank)
    assert kill_tree(root, grace=5, tag=tag) == [rank]
    assert not alive(rank)


def test_an_orphan_without_a_tag_is_found_by_the_session_of_its_dead_leader(tag: str) -> None:
    start = LAUNCHER.replace(", start_new_session=True", "")
    leader = spawn([sys.executable, "-c", start], stdout=subprocess.PIPE)
    assert leader.stdout is not None
    orphan = Identity.of(int(leader.stdout.readline()))
    root = Identity.of(leader.pid)
    leader.kill()
    leader.wait()
    assert alive(orphan)
    assert kill_tree(root, grace=5) == [orphan]
    assert not alive(orphan)


def test_a_process_that_ignores_the_request_is_killed(tag: str) -> None:
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    child = spawn([sys.executable, "-c", deaf], stdout=subprocess.PIPE, tag=tag)
    assert child.stdout is not None
    assert child.stdout.readline() == b"deaf\n"
    kill_tree(Identity.of(child.pid), grace=0.3)
    assert child.wait() == -signal.SIGKILL


def test_a_root_may_end_its_children_in_its_own_order(tag: str, tmp_path: Path) -> None:
    """Only the root is asked first: a child that is signalled before its parent looks like a crash to it."""
    parent = """
import signal, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"])
def stop(*_):
    time.sleep(0.3)
    print("child still ran:", child.poll() is None, flush=True)
    child.kill(); child.wait(); sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
while True: time.sleep(0.05)
"""
    process = spawn([sys.executable, "-c", parent], stdout=subprocess.PIPE, tag=tag)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    kill_tree(Identity.of(process.pid), grace=10)
    assert process.stdout.read() == b"child still ran: True\n"
    assert process.wait() == 0


def test_what_carries_the_spared_variable_is_left_alone_with_its_children(tag: str) -> None:
    """A stack's programs go after an accident; the jobs they started are adopted later."""
    job = f"""
import os, subprocess, sys
os.environ["JOB"] = "one"
subprocess.run([sys.executable, "-c", {LAUNCHER!r}])
"""
    program = spawn([sys.executable, "-c", job], stdout=subprocess.PIPE, tag=tag)
    assert program.stdout is not None
    rank = Identity.of(int(program.stdout.readline()))
    root = Identity.of(program.pid)
    (launcher,) = (identity for identity in descendants(root) if rank in descendants(identity))
    assert kill_tree(root, grace=5, tag=tag, spare="JOB") == [root]
    assert alive(launcher)
    assert alive(rank)
    assert not alive(root)
    program.wait()


def test_killing_what_is_gone_finds_nothing_and_spares_a_reused_pid() -> None:
    stranger = spawn(SLEEP)
    try:
        now = Identity.of(stranger.pid)
        assert kill_tree(replace(now, started=now.started - 7), grace=0.2) == []
        assert alive(now)
    finally:
        stranger.kill()
        stranger.wait()


def test_a_process_never_kills_itself_by_its_own_tag(tag: str) -> None:
    suicidal = f"from refit.proc import kill_tree; kill_tree(None, grace=0.2, tag={tag!r}); print('lives')"
    child = spawn([sys.executable, "-c", suicidal], stdout=subprocess.PIPE, tag=tag)
    assert child.communicate()[0] == b"lives\n"
