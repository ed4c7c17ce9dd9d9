"""Lists of what processes hold: a file a process, under a flock for as long as it lives, however it ends."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from pathlib import Path

from refit import log

_NOT_OURS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


class Holder:
    """This process's list in a folder: a line with a name that it holds, and one with a minus that it let go."""

    def __init__(self, folder: Path) -> None:
        self.names: set[str] = set()
        self._descriptor: int | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{os.getpid()}-{secrets.token_hex(4)}"
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
        except OSError as error:
            if error.errno not in _NOT_OURS:
                raise
            log.event("not_held", folder=str(folder), why=str(error))  # what we may not write, others must keep
        else:
            flock(self._descriptor, fcntl.LOCK_EX)

    @property
    def lost(self) -> bool:
        """Whether somebody has removed it."""
        return self._descriptor is not None and os.fstat(self._descriptor).st_nlink == 0

    def add(self, name: str) -> None:
        """Hold it."""
        if name not in self.names:
            self._write(name)
            self.names.add(name)

    def drop(self, name: str) -> None:
        """Hold it no longer."""
        if name not in self.names:
            return
        try:
            self._write(f"-{name}")
        except OSError as error:  # a full disk: it is held until this process ends
            log.event("not_let_go", name=name, why=str(error))
        else:
            self.names.remove(name)

    def _write(self, line: str) -> None:
        if self._descriptor is not None:
            os.write(self._descriptor, f"{line}\n".encode())


def names(path: Path) -> set[str]:
    """What is held by the process whose list this is; the list of one that has ended goes."""
    try:
        with path.open("rb") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                found: set[str] = set()
                for line in handle.read().decode().splitlines():
                    if line.startswith("-"):
                        found.discard(line[1:])
                    else:
                        found.add(line)
                return found
        path.unlink(missing_ok=True)
    except FileNotFoundError:
        pass
    return set()


def flock(descriptor: int, how: int) -> bool:
    """Lock an open file; False on a file system that has no such locks."""
    try:
        fcntl.flock(descriptor, how)
    except OSError as error:  # none on this file system: then nobody throws anything away
        log.event("no_flock", why=str(error))
        return False
    return True
