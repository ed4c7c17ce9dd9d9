"""Who runs a job on this machine: a lock on the job's folder, which ends with its holder, however that ends.

The lock (flock) is the kernel's and on the folder itself, so it leaves no file. It forbids nothing: who writes an
output has rules of its own. It tells a job that was killed from one that is alive.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

POLL_SECONDS = 0.05


class Place:
    """`alone`: no other living process of this machine runs the job. `shared`: another one does.

    Neither where the lock cannot be had at all, as on some network file systems. Children of a killed process that
    live on keep its lock.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.alone = self.shared = False
        self._ask()

    def wait(self, seconds: float) -> bool:
        """Wait so long for the other one to end; whether it has."""
        deadline = time.monotonic() + seconds
        while self.shared and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            self._ask()
        return self.alone

    def _ask(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.alone, self.shared = True, False
        except BlockingIOError:
            self.shared = True
        except OSError:
            self.shared = False


@contextmanager
def taken(folder: Path) -> Iterator[Place]:
    """Be at a job's place for as long as the context goes."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield Place(descriptor)
    finally:
        os.close(descriptor)
