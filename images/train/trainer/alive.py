"""Signs of life of a rank in work that has no steps: reading a model, exporting it.

A thread beats while the process does something: computes, reads or writes. So what takes long is not taken for hung,
however large the model, and what hangs is: a beat that only says that there is a thread would hide it for ever.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.task import Wire

EVERY_SECONDS = 10.0

LEAST_SHARE = 0.03
"""Of a processor; who uses less, and moves no data, does nothing."""

LEAST_BYTES = 1 << 20


@contextmanager
def while_working(wire: Wire, every: float = EVERY_SECONDS) -> Iterator[None]:
    """Beat on the wire, every so many seconds in which something was done."""
    over = threading.Event()
    thread = threading.Thread(target=_beat, args=(wire, over, every), name="alive", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _beat(wire: Wire, over: threading.Event, every: float) -> None:
    computed, moved = time.process_time(), _moved()
    while not over.wait(every):
        computed_by_now, moved_by_now = time.process_time(), _moved()
        if computed_by_now - computed >= LEAST_SHARE * every or moved_by_now - moved >= LEAST_BYTES:
            wire.beat()
        computed, moved = computed_by_now, moved_by_now


def _moved() -> int:
    """Bytes that this process has read and written so far, mapped files aside: those show as processor time."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    counts = dict(line.split(": ") for line in lines)
    return int(counts["rchar"]) + int(counts["wchar"])
