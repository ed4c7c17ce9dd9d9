"""What was fetched from elsewhere and lies on this machine: held by who uses it, thrown away when others need the room.

    fetched/<content>/           a committed folder
    fetched/objects/<object>/    the last versions of an object
    fetched/held/<process>       what a process holds, a line each; locked by it

A process holds what it was given until it lets go or ends: its list is under a flock, which the kernel drops with it,
however that ends. One descriptor a process, for a data stage holds thousands of objects. Before more is fetched the
entries that were asked for longest ago go, until what stays and what comes fit into the limit, and onto the disk. Never
one that a living process holds, or names in its command line (a model server outlives the controller that asked for
the copy). So what is in use together may be more than the limit.

Who takes an entry has a shared lock on `fetched/` for that moment, who throws some away an exclusive one.

The limit is REFIT_CACHE_GIB, in GiB; without it half of the disk. Drafts of fetches that were killed go too.

What it does not do: keep entries on a file system without flock from growing; there nobody knows what is in use.
"""

from __future__ import annotations

import fcntl
import math
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from refit import files, log
from refit.errors import BadInput, DiskFull
from refit.held import Holder, flock
from refit.held import names as held_by
from refit.manifest import MANIFEST
from refit.store import cache_folder

LIMIT = "REFIT_CACHE_GIB"
SHARE = 0.5
"""Of the disk, where nobody has set a limit."""

DRAFT, HELD = "draft-", "held"
LEFT_SECONDS = 3600.0
"""A draft that nobody holds, and that is so old, was left by a kill."""

_ENTRY = re.compile(r"^[0-9a-f]{32,64}$")


_holders: dict[Path, Holder] = {}
_changing = threading.Lock()
# A child has a list of its own; its parent's stays locked, by the descriptor that both have, until both have ended.
os.register_at_fork(after_in_child=_holders.clear)


def place() -> Path:
    """Where fetched copies lie."""
    return cache_folder() / "fetched"


def hold(entry: Path) -> bool:
    """Have nobody throw an entry away until this process lets it go or ends; False where it is not there (any more).

    It counts as used just now.
    """
    with _taking() as holder:
        if not entry.is_dir():
            return False
        holder.add(_name(entry))
        _touch(entry)
    return True


def make(entry: Path) -> None:
    """Have an entry, empty if it was not there, and hold it."""
    with _taking() as holder:
        entry.mkdir(parents=True, exist_ok=True)
        holder.add(_name(entry))
        _touch(entry)


def draft() -> Path:
    """A new folder of this process's, beside the entries, which it holds."""
    made = place() / f"{DRAFT}{os.getpid()}-{secrets.token_hex(4)}"
    make(made)
    return made


def become(draft: Path, entry: Path) -> bool:
    """Give a finished draft its name as an entry, and hold that; False where such an entry is there already."""
    with _taking() as holder:
        if not files.rename_folder(draft, entry):
            return False
        holder.add(_name(entry))
        holder.drop(_name(draft))
    return True


def let_go(entry: Path) -> None:
    """Hold an entry no longer."""
    with _changing:
        if (holder := _holders.get(place())) is not None and entry.is_relative_to(place()):
            holder.drop(_name(entry))


Mark = tuple[int, int]


def mark(entry: Path) -> Mark | None:
    """What tells a folder from another one that takes its name later (and maybe its inode); None where it is not there.

    Its inode, and when its manifest was written here, in ns.
    """
    try:
        inode = entry.stat().st_ino
    except OSError:
        return None
    try:
        return inode, (entry / MANIFEST).stat().st_mtime_ns
    except OSError:
        return inode, 0


def discard(entry: Path, seen: Mark | None) -> None:
    """Throw an entry away that was found damaged, whoever holds it: it is of use to nobody.

    Args:
        seen: its mark before it was looked at; another one that has come meanwhile stays.
    """
    with _changing, _locked(fcntl.LOCK_EX):
        gone = _aside(entry) if seen is not None and mark(entry) == seen else None
    if gone is not None:
        shutil.rmtree(gone, ignore_errors=True)
    let_go(entry)


@contextmanager
def on_this_disk() -> Iterator[None]:
    """What is fetched within needs room here.

    Raises:
        DiskFull: there is none.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in files.FULL:
            raise
        raise DiskFull(
            f"{place()}: no room for what is fetched: {error}. What lies there is in use, or was not enough. Free room "
            f"on its disk, put REFIT_CACHE on a larger one, or lower {LIMIT} so that other copies take less."
        ) from error


def make_room(needed: int) -> None:
    """Throw away what nobody uses, oldest first, until `needed` bytes more are within the limit and on the disk.

    Where that is not enough nothing is said: what is held stays, and the disk says itself when it is full.
    """
    place().mkdir(parents=True, exist_ok=True)
    entries = sorted((_used_at(entry), _size(entry), entry) for entry in _entries())
    lacking = max(
        sum(size for _, size, _ in entries) + needed - limit(), needed - shutil.disk_usage(place()).free
    )  # fmt: skip
    left = _left()
    if lacking <= 0 and not left:
        return
    gone: list[Path | None] = []
    with _changing, _locked(fcntl.LOCK_EX) as locked:
        in_use = _in_use() if locked else lambda _: True
        gone += [_aside(draft) for draft in left if not in_use(draft)]
        for _, size, entry in entries:
            if lacking <= 0:
                break
            if not in_use(entry) and (aside := _aside(entry)) is not None:
                log.event("fetched_away", entry=entry.name, bytes=size)
                gone.append(aside)
                lacking -= size
    for aside in filter(None, gone):
        shutil.rmtree(aside, ignore_errors=True)


def limit() -> int:
    """How many bytes of copies may stay.

    Raises:
        BadInput: the setting is no positive number.
    """
    told = os.environ.get(LIMIT)
    if not told:
        return int(SHARE * shutil.disk_usage(place()).total)
    try:
        gib = float(told)
    except ValueError:
        gib = math.nan
    if not 0 < gib < math.inf:
        raise BadInput(f"{LIMIT} is {told!r}; give a positive number of GiB, or leave it out for half of the disk.")
    return int(gib * (1 << 30))


def _entries() -> Iterator[Path]:
    for parent in (place(), place() / "objects"):
        if parent.is_dir():
            yield from (entry for entry in parent.iterdir() if _ENTRY.match(entry.name) and entry.is_dir())


def _used_at(entry: Path) -> float:
    try:
        return entry.stat().st_mtime
    except OSError:
        return 0.0


def _size(entry: Path) -> int:
    total = 0
    for root, _, names in os.walk(entry):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name), follow_symlinks=False).st_size
            except OSError:
                continue  # somebody replaces it at this moment
    return total


def _touch(entry: Path) -> None:
    try:
        os.utime(entry)
    except OSError as error:
        log.event("not_touched", entry=str(entry), why=str(error))


def _name(entry: Path) -> str:
    return entry.relative_to(place()).as_posix()


@contextmanager
def _taking() -> Iterator[Holder]:
    """This process's list, while nobody throws anything away."""
    with _changing, _locked(fcntl.LOCK_SH):
        before = _holders.get(place())
        if before is None or before.lost:
            _holders[place()] = Holder(place() / HELD)
            for name in before.names if before else ():
                _holders[place()].add(name)
        yield _holders[place()]


@contextmanager
def _locked(how: int) -> Iterator[bool]:
    """The lock on all entries, held for a moment; False where there is none to be had."""
    place().mkdir(parents=True, exist_ok=True)
    descriptor = os.open(place(), os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield flock(descriptor, how)
    finally:
        os.close(descriptor)


def _in_use() -> Callable[[Path], bool]:
    """Whether a living process of this machine holds an entry, or has it in its command line.

    Those that hold are asked first: who starts a server holds its model until then.
    """
    held = {name for path in (place() / HELD).glob("*") for name in held_by(path)}
    lines: list[bytes] = []

    def told(entry: Path) -> bool:
        if _name(entry) in held:
            return True
        if not lines:  # many an entry is held, and then nobody need look
            lines.extend(_read(path) for path in Path("/proc").glob("[0-9]*/cmdline"))
        return any(str(entry).encode() in line for line in lines)

    return told


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""  # it has ended, or is somebody else's


def _aside(entry: Path) -> Path | None:
    """Rename an entry: from then on it does not exist, whatever a kill leaves of it. None where that cannot be."""
    gone = place() / f"{DRAFT}gone-{secrets.token_hex(4)}"
    try:
        os.rename(entry, gone)
    except OSError:
        return None
    return gone


def _left() -> list[Path]:
    """What killed fetches and removals left."""
    drafts = place().glob(f"{DRAFT}*")
    return [one for one in drafts
            if time.time() - _used_at(one) > LEFT_SECONDS or one.name.startswith(f"{DRAFT}gone-")]  # fmt: skip
