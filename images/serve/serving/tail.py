"""Read a growing file from where we stopped, also after a kill, a rotation or a restart.

    for lines in batches:            tail = Tail(log, state)
        store(tail.read())           # complete lines only
        tail.commit()                # the offset, by rename; a kill before it means: the same lines again

At least once, never lost: what is stored needs a key of its own. A rotated file (`name.1`) is found by its inode and
read to its end first.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from refit import files

BATCH_BYTES = 1 << 20


class Tail:
    """A place in a file: inode and offset, kept in a small file beside it."""

    def __init__(self, path: Path, state: Path) -> None:
        self.path = path
        self._state = state
        try:
            kept = json.loads(state.read_bytes())
            self._inode, self._offset = int(kept["inode"]), int(kept["offset"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            self._inode, self._offset = 0, 0
        self._next = (self._inode, self._offset)

    def read(self) -> list[bytes]:
        """The next complete lines, a batch at most; empty when there are none. Repeats until `commit`."""
        try:
            with self._where().open("rb") as handle:
                stat = os.fstat(handle.fileno())
                # A file that became shorter was written anew.
                start = self._offset if stat.st_ino == self._inode and stat.st_size >= self._offset else 0
                handle.seek(start)
                chunk = handle.read(BATCH_BYTES)
        except FileNotFoundError:
            return []
        end = chunk.rfind(b"\n") + 1
        if end == 0 and len(chunk) == BATCH_BYTES:
            end = len(chunk)  # a line longer than a batch is no line of ours
        self._next = (stat.st_ino, start + end)
        return [line for line in chunk[:end].split(b"\n") if line]

    def commit(self) -> None:
        """What was read last is stored elsewhere: go on behind it."""
        if self._next != (self._inode, self._offset):
            self._inode, self._offset = self._next
            state = {"inode": self._inode, "offset": self._offset}
            files.write(self._state, json.dumps(state).encode(), mode=0o600)

    def finished(self, path: Path) -> bool:
        """Whether everything in `path` was read and committed."""
        try:
            stat = path.stat()
        except FileNotFoundError:
            return True
        return stat.st_ino == self._inode and self._offset >= stat.st_size

    def _where(self) -> Path:
        """The rotated file while something of it is left, else the current one."""
        rotated = self.path.with_name(self.path.name + ".1")
        if _inode(self.path) == self._inode:
            return self.path
        if _inode(rotated) is not None and not self.finished(rotated):
            return rotated
        return self.path


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None
