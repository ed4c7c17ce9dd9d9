"""How a job tells a person how far it is: one line from its status.json."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from typing import Any

from refit.job import STATUS
from refit.store import join, store_for

EVERY_SECONDS = 30.0
"""A line at least this often, so that a log never looks asleep."""

STEP = 0.1
"""And one for every further tenth of the work."""


def status_of(output: str) -> dict[str, Any] | None:
    """The status.json of a job's folder; None before the first."""
    try:
        document = json.loads(store_for(output).read(join(output, STATUS)))
    except (FileNotFoundError, ValueError):
        return None
    return document if isinstance(document, dict) else None


def share(status: dict[str, Any]) -> float:
    """How much of the work is done, from 0 to 1."""
    total = float(status.get("total") or 0)
    return min(1.0, float(status.get("done") or 0) / total) if total > 0 else 0.0


def line(status: dict[str, Any]) -> str:
    """`train 45 %, 12 min left, loss 1.93, 1,820 tokens/s`."""
    parts = [f"{status.get('phase', 'work')} {share(status):.0%}".replace("%", " %")]
    if (left := status.get("seconds_left")) is not None and share(status) < 1:
        parts.append(f"{duration(float(left))} left")
    if (loss := status.get("loss")) is not None:
        parts.append(f"loss {float(loss):.3g}")
    if (rate := status.get("tokens_per_second")) is not None:
        parts.append(f"{float(rate):,.0f} tokens/s")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """A duration as a person says it: 40 s, 12 min, 3.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def paced(tell: Callable[[], None], every: float) -> Callable[[], None]:
    """`tell`, called at most once in so many seconds, however often it is asked to."""
    last = -math.inf

    def now_and_then() -> None:
        nonlocal last
        if time.monotonic() - last >= every:
            last = time.monotonic()
            tell()

    return now_and_then


class Teller:
    """Decides when there is something new to say."""

    def __init__(self) -> None:
        self._phase: str | None = None
        self._share = -1.0
        self._at = 0.0

    def news(self, status: dict[str, Any], now: float) -> str | None:
        """The line to log now, or None when the last one still does."""
        phase, done = str(status.get("phase")), share(status)
        due = phase != self._phase or done >= self._share + STEP or now - self._at >= EVERY_SECONDS
        if not due:
            return None
        self._phase, self._share, self._at = phase, done, now
        return line(status)
