"""Read a growing file from where we stopped, also after a kill, a rotation or a restart.

    while lines := tail.read():      complete lines only
        store(lines)
        tail.commit()                the place, by rename; a kill before it means: the same lines again

At least once, never lost: what is stored needs a key of its own. A rotated file (`name.1`) is recognised and read to
its end first. A file is known by its inode and how it begins, since a new file may get the inode of one just removed.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from refit import files

BATCH_BYTES = 1 << 20
HEAD_BYTES = 256


@dataclass(frozen=True)
class Place:
    """How far a file was read: which file (inode, hash of its first bytes), and the offset."""

    inode: int = 0
    offset: int = 0
    head: str = ""


class Tail:
    """A place in a file, kept in a small file beside it."""

    def __init__(self, path: Path, state: Path) -> None:
        self.path = path
        self._rotated = path.with_name(path.name + ".1")
        self._state = state
        try:
            self._place = Place(**json.loads(state.read_bytes()))
        except (FileNotFoundError, ValueError, TypeError):
            self._place = Place()
        self._next = self._place

    def read(self) -> list[bytes]:
        """The next complete lines, a batch at most; empty when there are none. Repeats until `commit`."""
        self._next = self._place
        path = self.path if self._is_ours(self.path) or self.finished(self._rotated) else self._rotated
        try:
            with path.open("rb") as handle:
                start = self._place.offset if self._is_this(handle) else 0
                handle.seek(start)
                chunk = handle.read(BATCH_BYTES)
                end = chunk.rfind(b"\n") + 1
                if end == 0 and len(chunk) == BATCH_BYTES:
                    end = len(chunk)  # a line longer than a batch is no line of ours
                if end == 0:
                    return []
                self._next = Place(os.fstat(handle.fileno()).st_ino, start + end, _head(handle, start + end))
        except FileNotFoundError:
            return []
        return [line for line in chunk[:end].split(b"\n") if line]

    def commit(self) -> None:
        """What was read last is stored elsewhere: go on behind it."""
        if self._next != self._place:
            files.write(self._state, json.dumps(asdict(self._next)).encode(), mode=0o600)
            self._place = self._next

    def finished(self, path: Path) -> bool:
        """Whether everything in a file was read and committed; a file that is not there has nothing to read."""
        try:
            with path.open("rb") as handle:
                return self._is_this(handle) and self._place.offset >= os.fstat(handle.fileno()).st_size
        except FileNotFoundError:
            return True

    def _is_ours(self, path: Path) -> bool:
        try:
            with path.open("rb") as handle:
                return self._is_this(handle)
        except FileNotFoundError:
            return False

    def _is_this(self, handle: BinaryIO) -> bool:
        stat, place = os.fstat(handle.fileno()), self._place
        if stat.st_ino != place.inode or stat.st_size < place.offset:
            return False  # another file, or one that was written anew
        return _head(handle, place.offset) == place.head


def _head(handle: BinaryIO, offset: int) -> str:
    return hashlib.sha256(os.pread(handle.fileno(), min(offset, HEAD_BYTES), 0)).hexdigest()
