"""Does a save still fit between being told to stop and being killed? From how long saves took so far."""

from __future__ import annotations

from collections import deque

from refit.spec import Checkpoint

OWN_SECONDS = 5.0
"""What the launcher keeps of the grace period for its own end: the ranks' last words, metrics, events."""

REMEMBERED = 20
"""So many last saves are counted by."""


def budget(settings: Checkpoint) -> float:
    """Seconds in which the ranks must have ended when they are told to stop; nine tenths of short grace periods."""
    return settings.grace_seconds - min(OWN_SECONDS, settings.grace_seconds / 10)


class Durations:
    """How long the last saves took, from their beginning to their commit; retention and copies come after."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=REMEMBERED)

    def add(self, seconds: float) -> None:
        """Count one more."""
        self._last.append(seconds)

    @property
    def slowest(self) -> float:
        """Seconds; 0 as long as none was measured."""
        return max(self._last, default=0.0)

    def fits(self, left: float, running: float | None) -> bool:
        """Whether a new save ends within `left` seconds, after one that has been running for so many; None: none is.

        As long as none was measured it is tried.
        """
        before = 0.0 if running is None else max(0.0, self.slowest - running)
        return not self._last or before + self.slowest <= left
