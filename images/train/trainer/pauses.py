"""How long the launcher waits before it launches again: what is away for a while is not asked for all at once.

Ranks that were lost are replaced at once. Where the store or a save failed a launch, the next one waits, longer each
time in a row without a step: all launches would be burnt within seconds of an outage else.
"""

from __future__ import annotations

from refit.errors import Infrastructure, NodeLost

FIRST, GROWTH, LONGEST = 5.0, 4.0, 300.0
"""Seconds: 5, 20, 80, 300, 300."""


class Pauses:
    """The launches in a row that an outage ended before a step."""

    def __init__(self) -> None:
        self._idle = 0

    def after(self, error: Infrastructure, *, stepped: bool) -> float:
        """Seconds to wait after a launch that ended so; `stepped` says whether it had taken a step."""
        if isinstance(error, NodeLost):
            return 0.0
        self._idle = 1 if stepped else self._idle + 1
        return min(LONGEST, FIRST * GROWTH ** (self._idle - 1))
