"""What was fetched from elsewhere and lies on this machine: held by who uses it, thrown away when others need the room.

    fetched/<content>/           a committed folder
    fetched/objects/<object>/    the last versions of an object

A process holds what it was given until it ends (a shared flock on the folder, which the kernel drops with it, however
that ends). Before more is fetched the entries that were asked for longest ago go, until what stays and what comes fit
into the limit, and onto the disk. Never one that a process holds, or names in its command line (a model server outlives
the controller that asked for the copy). So what is in use together may be more than the limit.

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
from collections.abc import Iterator
from pathlib import Path

from refit import log
from refit.errors import BadInput
from refit.store import cache_folder

LIMIT = "REFIT_CACHE_GIB"
SHARE = 0.5
"""Of the disk, where nobody has set a limit."""

DRAFT = "draft-"
LEFT_SECONDS = 3600.0
"""A draft that nobody holds, and that is so old, was left by a kill."""

_ENTRY = re.compile(r"^[0-9a-f]{32,64}$")
_held: dict[Path, int] = {}
_changing = threading.Lock()


def place() -> Path:
    """Where fetched copies lie."""
    return cache_folder() / "fetched"


def hold(entry: Path) -> bool:
    """Have nobody throw an entry away until this process ends; False where it is not there (any more).

    It counts as used just now.
    """
    with _changing:
        if not _is_held(entry):
            try:
                descriptor = os.open(entry, os.O_RDONLY | os.O_DIRECTORY)
            except OSError:
                return False
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                if os.fstat(descriptor).st_ino != os.stat(entry).st_ino:  # it was going, and another one has come
                    raise BlockingIOError
            except (BlockingIOError, FileNotFoundError):
                os.close(descriptor)
                return False
            except OSError as error:  # no flock here: then nobody can throw it away either
                log.event("not_held", entry=str(entry), why=str(error))
            _held[entry] = descriptor
    try:
        os.utime(entry)
    except OSError as error:
        log.event("not_touched", entry=str(entry), why=str(error))
    return True


def renamed(draft: Path, entry: Path) -> None:
    """What was held as a draft is held as the entry that it has become: the lock is on the folder, not on its name."""
    with _changing:
        if (before := _held.pop(entry, None)) is not None:
            os.close(before)
        _held[entry] = _held.pop(draft)


def let_go(entry: Path) -> None:
    """Hold an entry no longer."""
    with _changing:
        if (descriptor := _held.pop(entry, None)) is not None:
            os.close(descriptor)


def draft() -> Path:
    """A new folder of this process's, beside the entries, which it holds."""
    while True:
        made = place() / f"{DRAFT}{os.getpid()}-{secrets.token_hex(4)}"
        made.mkdir(parents=True)
        if hold(made):
            return made


def make_room(needed: int) -> None:
    """Throw away what nobody uses, oldest first, until `needed` bytes more are within the limit and on the disk.

    Where that is not enough nothing is said: what is held stays, and the disk says itself when it is full.
    """
    place().mkdir(parents=True, exist_ok=True)
    _clear_drafts()
    entries = sorted(((_used_at(entry), _size(entry), entry) for entry in _entries()), key=lambda told: told[0])
    kept, most = sum(size for _, size, _ in entries), limit()
    for _, size, entry in entries:
        if kept + needed <= most and needed <= shutil.disk_usage(place()).free:
            return
        if _throw_away(entry):
            kept -= size
            log.event("fetched_away", entry=entry.name, bytes=size)


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


def _is_held(entry: Path) -> bool:
    """Whether this process holds it, and it is still the one that lies there."""
    descriptor = _held.get(entry)
    if descriptor is None:
        return False
    try:
        if os.fstat(descriptor).st_ino == os.stat(entry).st_ino:
            return True
    except OSError:
        pass
    os.close(_held.pop(entry))
    return False


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


def _throw_away(entry: Path) -> bool:
    """Take an entry away that nobody uses; whether it did.

    Under an exclusive lock it is renamed: from then on it does not exist, whatever a kill leaves of it.
    """
    if _is_named(entry):
        return False
    try:
        descriptor = os.open(entry, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        gone = place() / f"{DRAFT}gone-{secrets.token_hex(4)}"
        os.rename(entry, gone)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    shutil.rmtree(gone, ignore_errors=True)
    return True


def _is_named(entry: Path) -> bool:
    """Whether a process of this machine has an entry in its command line."""
    name = str(entry).encode()
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if name in line.read_bytes():
                return True
        except OSError:
            continue  # it has ended, or is somebody else's
    return False


def _clear_drafts() -> None:
    for left in place().glob(f"{DRAFT}*"):
        if time.time() - _used_at(left) > LEFT_SECONDS or left.name.startswith(f"{DRAFT}gone-"):
            _throw_away(left)
