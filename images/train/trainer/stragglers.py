"""Slow ranks: which one keeps the others waiting, told from how long each takes to compute.

Ranks that wait for each other all take the slowest one's time. So what is compared is their time before they meet
(data and forward), with two things at once: what is usual, a median frozen early, which a rank that slows down cannot
drag along; and the other ranks in the same step, for a storage that hangs slows all of them. One step says nothing, a
garbage collection or a page fault is that long: `STEPS` in a row do.

The pair of references is that of NVIDIA's resiliency extension (individual and relative scores); five steps over about
twice the frozen median is this house's rule. What it does not do: say why, or act; or name anybody when half of the
ranks are slow.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

FACTOR = 1.8
"""A rank is slow above so many times its references. Twice as long is what is to be found; at a line drawn there, noise
would put every second step of such a rank below, and five in a row above might take hours to come."""

STEPS = 5
"""For so many judged steps in a row, to be called slow; and below again for so many, to be called well."""

SETTLE_STEPS, BASELINE_STEPS = 2, 20
"""After the first few (allocators, caches), the usual is the median of so many steps, and then never changes."""


@dataclass(frozen=True)
class Slow:
    """A rank has become slow, or (`over`) is as fast as the others again.

    `times` is how much longer it took than the others over the last `STEPS` judged steps, their median.
    """

    rank: int
    step: int
    times: float
    over: bool = False


class Stragglers:
    """Watches one launch's ranks, or nodes: whatever a column stands for. Memory is `BASELINE_STEPS` rows."""

    def __init__(self, ranks: int) -> None:
        self._settling = SETTLE_STEPS
        self._first: list[NDArray[np.float64]] = []
        self._usual: NDArray[np.float64] | None = None
        self._streak = np.zeros(ranks, dtype=np.int64)
        self._slow = np.zeros(ranks, dtype=bool)
        self._recent = np.ones((STEPS, ranks))
        self._judged = 0

    def see(
        self, step: int, seconds: ArrayLike, tokens: ArrayLike | None = None, *, marked: bool = False
    ) -> list[Slow]:
        """Take in how long each rank computed before it met the others; who has become slow or well, mostly nobody.

        Args:
            step: Its number, for the verdicts.
            seconds: Shape (ranks,); NaN where a rank has not said.
            tokens: Shape (ranks,): what each rank computed, where that differs; times count by the token then.
            marked: There was a save or an evaluation in this step: it is not judged, and ends no row of slow steps.
        """
        if marked:
            return []
        times = np.asarray(seconds, dtype=np.float64)
        if tokens is not None:
            times = times / np.maximum(np.asarray(tokens, dtype=np.float64), 1.0)
        if self._usual is None:
            self._learn(times)
            return []
        ratio = times / self._usual
        over = ratio > FACTOR
        if not over.any() and not self._slow.any():  # nearly always
            self._streak[:] = 0
            return []
        return self._judge(step, ratio)

    def _learn(self, times: NDArray[np.float64]) -> None:
        if self._settling:
            self._settling -= 1
            return
        self._first.append(times)
        if len(self._first) == BASELINE_STEPS:
            own = np.nanmedian(self._first, axis=0)
            # One that is slow from the start is held against the others, not against itself.
            self._usual = np.fmin(own, np.nanmedian(own))
            self._first.clear()

    def _judge(self, step: int, ratio: NDArray[np.float64]) -> list[Slow]:
        times = ratio / np.maximum(others(ratio), 1.0)
        self._recent[self._judged % STEPS] = times
        self._judged += 1
        changed = (times > FACTOR) != self._slow
        self._streak = np.where(np.isnan(times), self._streak, np.where(changed, self._streak + 1, 0))
        verdicts = []
        for rank in np.flatnonzero(self._streak >= STEPS):
            self._slow[rank], self._streak[rank] = not self._slow[rank], 0
            median = float(np.nanmedian(self._recent[:, rank]))
            verdicts.append(Slow(int(rank), step, median, over=not self._slow[rank]))
        return verdicts


def others(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The median of all the other values, for each (the upper of two; NaN counts as large; 1 where there is no other).

    Shape (n,) to (n,). Leaving one out matters where there are few: of two, each is compared with the other.
    """
    count = len(values)
    if count == 1:
        return np.ones(1)
    middle = (count - 1) // 2
    ordered = np.sort(values)
    return np.where(values <= ordered[middle], ordered[middle + 1], ordered[middle])
