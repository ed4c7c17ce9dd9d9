"""How much memory the stack and its jobs take at the peak."""

from __future__ import annotations

import threading
from pathlib import Path

from refit.proc import STACK_TAG, find_tagged


class PeakMemory:
    """Samples the memory of everything that carries the stack's mark; `bytes` is the highest sum seen.

    Memory is PSS: a page that n processes share counts 1/n in each, so the sum counts it once. Use as a context.
    """

    def __init__(self, tag: str, every_seconds: float = 3.0) -> None:
        self.bytes = 0
        self._tag = tag
        self._every = every_seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            found = find_tagged(self._tag, variable=STACK_TAG)
            self.bytes = max(self.bytes, sum(pss(identity.pid) for identity in found))
            if self._stop.wait(self._every):
                return


def pss(pid: int) -> int:
    """A process's proportional set size in bytes; 0 when it has ended or is not ours to look at."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return 0
    return 0
