"""How long a rank may say nothing: soon it is named, much later its launch is ended.

Ranks speak with every micro batch, and every half second while they wait for a save; so when steps are taken, silence
is short. What it does not do: name a rank before the first step, or while it exports: that takes what it takes, and
who does something there beats (`alive`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from refit.spec import Train

STARTUP_SECONDS = 600.0
"""How long the ranks may take to their first step: imports, the model, a checkpoint."""

NAMED_SECONDS, NAMED_STEPS = 9.0, 2.7
"""A rank is named after so many seconds, or so many of its long (p99) steps where those are more. A tenth below 10 s
and 3 steps, within which a person or a program may count on it: the silence is only looked at now and then."""

RECENT_STEPS = 1000


class Patience:
    """How long a silence may last: the spec's limit, or ten times the longest that was seen since the first step."""

    def __init__(self, train: Train) -> None:
        self._least, self._longest, self.is_stepping = train.hang_seconds, 0.0, False

    @property
    def seconds(self) -> float:
        """The limit now."""
        if not self.is_stepping:
            return max(STARTUP_SECONDS, self._least)
        return max(self._least, 10 * self._longest)

    def heard(self, kind: str, silence: float) -> None:
        """Learn from a message and the silence before it."""
        if self.is_stepping:
            self._longest = max(self._longest, silence)
        self.is_stepping = self.is_stepping or kind == "step"
        if kind == "phase":  # export takes its own time
            self.is_stepping = False


@dataclass(frozen=True)
class Silent:
    """Rank `rank` has said nothing for `seconds`, where a long step takes `step_seconds`; or (`over`) speaks again."""

    rank: int
    seconds: float
    step_seconds: float
    over: bool = False


class Silence:
    """Names the rank that keeps the others waiting, once for each silence; of one launch."""

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=RECENT_STEPS)
        self._named: Silent | None = None
        self._since = 0.0

    def stepped(self, seconds: float) -> None:
        """A step took so long, with what held it up."""
        self._steps.append(seconds)

    def pause(self) -> None:
        """Other work than steps begins."""
        self._steps.clear()
        self._named = None

    def see(self, now: float, heard: Sequence[float], blame: Callable[[float], int]) -> Silent | None:
        """Look at when each rank was last heard.

        `blame` says which rank keeps the others waiting, of those that were silent for so many seconds.
        """
        if self._named is not None:
            return self._spoken(self._named, now, heard)
        longest = now - min(heard)
        if not self._steps or longest < NAMED_SECONDS:
            return None
        step = float(np.quantile(self._steps, 0.99))
        limit = max(NAMED_SECONDS, NAMED_STEPS * step)
        if longest < limit:
            return None
        rank = blame(limit)
        self._named, self._since = Silent(rank, now - heard[rank], step), heard[rank]
        return self._named

    def _spoken(self, named: Silent, now: float, heard: Sequence[float]) -> Silent | None:
        if heard[named.rank] == self._since:
            return None
        self._named = None
        return replace(named, seconds=now - self._since, over=True)
