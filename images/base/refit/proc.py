"""Processes that outlive whoever started them: named so that no other process can be taken for them, and ended whole.

A pid alone is not a name: numbers are used again. An `Identity` is the pid, the kernel's start time of it, and the boot
it belongs to; it can be written to a file and checked days later by another process.

A tree is more than descendants. torchrun puts each rank in a session of its own, and a child whose parent was killed
belongs to init. So `kill_tree` looks for members in three ways: descendants, members of the sessions that the tree
leads, and whatever carries the tree's mark in its environment (`spawn(tag=…)` sets it; children inherit it).

What it does not do: reach processes of another user (unless we are root), or a process stuck in the kernel; it says so
by raising `StillAlive`. Known limit: a program that rewrites its title (PostgreSQL's backends, Airflow's workers)
overwrites its visible environment, and is then found by descent or session only.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

TAG = "REFIT_PROCESS_TAG"
"""The environment variable that marks everything one job started."""

STACK_TAG = "REFIT_STACK_TAG"
"""The same for everything one embedded stack started, jobs included."""

POLL_SECONDS = 0.05
KILL_SECONDS = 10.0
"""How long a process may take to disappear after SIGKILL; longer means that it hangs inside the kernel."""


class StillAlive(RuntimeError):
    """Processes that SIGKILL did not end: of another user, or stuck in the kernel."""

    def __init__(self, left: Iterable[Identity]) -> None:
        self.left = sorted(left, key=lambda identity: identity.pid)
        pids = ", ".join(str(identity.pid) for identity in self.left)
        super().__init__(f"still alive {KILL_SECONDS:.0f} s after SIGKILL: pid {pids}")


@dataclass(frozen=True, slots=True)
class Identity:
    """One process, and no other: the pid, its start (clock ticks since boot) and the boot."""

    pid: int
    started: int
    boot: str

    @classmethod
    def of(cls, pid: int) -> Identity:
        """The identity of a process that exists (a zombie does); `ProcessLookupError` when it does not."""
        stat = _stat(pid)
        if stat is None:
            raise ProcessLookupError(f"no process {pid}")
        return cls(pid, stat.started, boot_id())

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads back."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Identity:
        """Read back what `to_json` wrote."""
        return cls(int(document["pid"]), int(document["started"]), str(document["boot"]))


@dataclass(frozen=True, slots=True)
class _Stat:
    """The few fields of /proc/PID/stat that we need."""

    pid: int
    state: str
    parent: int
    session: int
    started: int


@cache
def boot_id() -> str:
    """The kernel's name for this boot: start times of different boots must not be compared."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before it may hold spaces and parentheses
    return _Stat(pid, state=fields[0], parent=int(fields[1]), session=int(fields[3]), started=int(fields[19]))


def _processes() -> Iterator[_Stat]:
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and (stat := _stat(int(entry.name))) is not None:
            yield stat


def _runs(stat: _Stat) -> bool:
    return stat.state not in "ZX"  # a zombie has ended; only its parent has not looked yet


def alive(identity: Identity) -> bool:
    """True while this very process runs; a zombie, a pid used again or another boot is False."""
    stat = _stat(identity.pid)
    return stat is not None and _runs(stat) and stat.started == identity.started and identity.boot == boot_id()


def spawn(
    argv: Sequence[str | os.PathLike[str]],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    stdout: int | IO[Any] | None = None,
    stderr: int | IO[Any] | None = subprocess.STDOUT,
    tag: str | None = None,
) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own, so that neither a Ctrl-C nor our own end reaches it.

    Who stays keeps the Popen (and must `wait` or `poll`, or the ended child remains a zombie); who leaves records
    `Identity.of(child.pid)`. `tag` marks the process and all its children with `REFIT_PROCESS_TAG`.
    """
    environment = dict(os.environ if env is None else env)
    if tag is not None:
        environment[TAG] = tag
    return subprocess.Popen(
        argv, env=environment, cwd=cwd, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True
    )


def descendants(identity: Identity) -> list[Identity]:
    """Children, their children and so on, that run now; empty when the process itself has ended."""
    return [] if not alive(identity) else _below({identity.pid}, list(_processes()))


def _below(roots: set[int], processes: list[_Stat]) -> list[Identity]:
    children: dict[int, list[_Stat]] = {}
    for stat in processes:
        children.setdefault(stat.parent, []).append(stat)
    found: list[_Stat] = []
    frontier = list(roots)
    while frontier:
        below = children.get(frontier.pop(), [])
        found += below
        frontier += [stat.pid for stat in below]
    return [Identity(stat.pid, stat.started, boot_id()) for stat in found if _runs(stat)]


def find_tagged(tag: str, *, variable: str = TAG) -> list[Identity]:
    """Every running process whose environment carries `variable=tag`, except this one."""
    return [
        Identity(stat.pid, stat.started, boot_id())
        for stat in _processes()
        if stat.pid != os.getpid() and _runs(stat) and (variable, tag) in _environment(stat.pid)
    ]


def _environment(pid: int) -> list[tuple[str, str]]:
    try:
        block = Path(f"/proc/{pid}/environ").read_bytes()
    except (PermissionError, FileNotFoundError, ProcessLookupError):
        return []  # of another user, or gone while we looked
    entries = block.decode(errors="replace").split("\0")
    return [(name, value) for name, equals, value in (entry.partition("=") for entry in entries) if equals]


def kill_tree(
    identity: Identity | None,
    *,
    grace: float = 10.0,
    tag: str | None = None,
    variable: str = TAG,
    spare: str | None = None,
) -> list[Identity]:
    """End a process and all that belongs to it, and return only when all of it is verified gone.

    The root gets SIGTERM first and `grace` seconds to end its children in its own order. What is left of the tree when
    the root has ended gets SIGTERM too, and SIGKILL when the time is over. Returns every process that was found; an
    empty list means that nothing was running. `identity` may be None or long dead: then the tag alone is followed.
    A process whose environment has the variable `spare`, whatever its value, is left alone with all its descendants.

    Raises `StillAlive` when something survives SIGKILL.
    """
    found: set[Identity] = set()
    asked: set[Identity] = set()
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline:
        members = _members(identity, found, tag, variable, spare)
        if not members:
            return sorted(found, key=lambda member: member.pid)
        ask = {identity} if identity in members else members
        for member in ask - asked:
            assert member is not None
            _signal(member, signal.SIGTERM)
            asked.add(member)
        time.sleep(POLL_SECONDS)
    deadline = time.monotonic() + KILL_SECONDS
    while members := _members(identity, found, tag, variable, spare):
        if time.monotonic() > deadline:
            raise StillAlive(members)
        for member in members:
            _signal(member, signal.SIGKILL)
        time.sleep(POLL_SECONDS)
    return sorted(found, key=lambda member: member.pid)


def _members(
    identity: Identity | None, found: set[Identity], tag: str | None, variable: str, spare: str | None
) -> set[Identity]:
    """What runs of the tree at this moment. `found` is what was seen so far, and grows."""
    processes = list(_processes())
    running = {Identity(stat.pid, stat.started, boot_id()): stat for stat in processes if _runs(stat)}
    taken = {stat.pid: stat.started for stat in processes}
    seeds = set(found)
    if tag is not None:
        seeds.update(find_tagged(tag, variable=variable))
    if identity is not None and identity.boot == boot_id():
        seeds.add(identity)
    # A session keeps its leader's number after the leader's end, and no other process gets that number while a member
    # lives. Only when the number names a different process now is the session a stranger's.
    led = {seed.pid for seed in seeds if taken.get(seed.pid, seed.started) == seed.started}
    members = {seed for seed in seeds if seed in running}
    members.update(member for member, stat in running.items() if stat.session in led)
    members.update(_below({member.pid for member in members}, processes))
    if spare is not None:
        spared = {member.pid for member in members if any(name == spare for name, _ in _environment(member.pid))}
        members -= {member for member in members if member.pid in spared} | set(_below(spared, processes))
    members = {member for member in members if member.pid != os.getpid()}
    found.update(members)
    return members


def _signal(identity: Identity, number: signal.Signals) -> None:
    """Signal this very process: the handle is opened first and checked then, so the pid cannot change hands between."""
    try:
        handle = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return
    try:
        if alive(identity):
            signal.pidfd_send_signal(handle, number)
    except (ProcessLookupError, PermissionError):
        return  # gone by itself, or not ours: the check after it tells which
    finally:
        os.close(handle)
