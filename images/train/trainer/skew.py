"""Data skew: ranks that are given more tokens, or more targets, than others for a long time.

Packs are of one length, so a rank with fewer tokens computes as long, on padding: its work is wasted. Shares of single
steps differ by chance; what is compared is the sum over a window, and a difference must also lie beyond what the steps'
own spread explains.

What it does not do: ask the ranks. Which packs each has follows from the step, and whoever deals them out knows.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

WINDOW_STEPS = 100
LIMIT = 0.10
"""Ranks may differ by so much, as a share of their mean."""

ERRORS = 6.0
"""And a difference counts from so many standard errors on."""


@dataclass(frozen=True)
class Skewed:
    """Over the last steps rank `most` had more of `what` (tokens, targets) than rank `least`, by `share` of the mean.

    With `over` it no longer has.
    """

    what: str
    step: int
    most: int
    least: int
    share: float
    over: bool = False


class Skew:
    """Watches one figure of all ranks; memory is a window of rows."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._rows: deque[NDArray[np.float64]] = deque(maxlen=WINDOW_STEPS)
        self._told = False

    def see(self, step: int, counts: ArrayLike) -> Skewed | None:
        """Take in what each rank was given in a step, shape (ranks,); what has begun or ended with it, mostly None."""
        self._rows.append(np.array(counts, dtype=np.float64))
        if len(self._rows) < WINDOW_STEPS or step % (WINDOW_STEPS // 10):  # the window hardly moves in a step
            return None
        rows = np.array(self._rows)
        means = rows.mean(axis=0)
        most, least = int(means.argmax()), int(means.argmin())
        apart = float(means[most] - means[least])
        error = float((rows[:, most] - rows[:, least]).std()) / WINDOW_STEPS**0.5
        share = apart / max(float(means.mean()), 1.0)
        skewed = share > LIMIT and apart > ERRORS * error
        if skewed == self._told:
            return None
        self._told = skewed
        return Skewed(self._what, step, most, least, share, over=not skewed)
