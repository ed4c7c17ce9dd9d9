"""What a step made of this rank's machine, for its record: pace, memory, share of the peak, and the card's own figures.

Without `train.peak_flops` there is no MFU, and without a card (`train.gpus_per_node`) nothing of one.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from typing import Any

from trainer import device
from trainer.gpus import Meter
from trainer.plan import flops_of
from trainer.task import Task

PAGE = resource.getpagesize()

CARD_SECONDS = 1.0
"""The card is asked at most so often; its utilisation is a mean over such a time anyway."""


class Usage:
    """Of one rank. `sizes` gives the elements of all weights and of those that are trained."""

    def __init__(self, task: Task, sizes: Callable[[], tuple[int, int]]) -> None:
        peak = task.train.peak_flops
        self._peak = peak * task.ranks if peak else None
        self._flops_per_token = flops_of(*sizes(), 1.0) if peak else 0.0
        self._meter = Meter.of(int(os.environ.get("LOCAL_RANK", 0))) if task.train.gpus_per_node else None
        self._asked, self._card = -CARD_SECONDS, {}  # type: float, dict[str, float]

    def of(self, tokens: int, seconds: float) -> dict[str, Any]:
        """What the record of a step with so many tokens of all ranks says. `resident` is in bytes."""
        told: dict[str, Any] = {"tokens_per_second": tokens / seconds, "resident": resident(), **device.memory()}
        if self._peak:
            told["mfu"] = self._flops_per_token * tokens / (seconds * self._peak)
        if self._meter and time.monotonic() - self._asked >= CARD_SECONDS:
            self._asked, self._card = time.monotonic(), self._meter.read()
        return told | self._card


def resident() -> int:
    """Bytes of memory that this process has now."""
    descriptor = os.open("/proc/self/statm", os.O_RDONLY)
    try:
        return int(os.read(descriptor, 100).split()[1]) * PAGE
    finally:
        os.close(descriptor)
