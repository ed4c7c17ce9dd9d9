"""How long a rank is in collectives: what it sends and receives, and what it waits for the others there.

DeepSpeed's backend looks torch.distributed's functions up by name, or keeps them from when it is made; so they are
wrapped where they are looked up, before an engine is made. A call that returns at once is timed again where its handle
is waited for.

What is measured: seconds in which the rank's own thread is inside of a collective. On a processor (gloo) that is all
of it. On a card collectives run beside: then it is only what the host waits for. The waiting for a slower rank counts
too: who is slow shows in the others' communication.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from torch import distributed

NAMES = (
    "all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_into_tensor", "all_gather_object",
    "all_gather_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor", "broadcast", "broadcast_object_list",
    "all_to_all_single", "all_to_all", "barrier", "gather", "scatter",
)  # fmt: skip


class Clock:
    """Seconds in collectives since this process began; one within another counts once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = False

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, its time counted."""

        @functools.wraps(call)
        def inner(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return call(*args, **kwargs)
            self._inside, began = True, time.perf_counter()
            try:
                answer = call(*args, **kwargs)
            finally:
                self._inside = False
                self.seconds += time.perf_counter() - began
            return _Handle(answer, self) if isinstance(answer, distributed.Work) else answer

        return inner


class _Handle:
    """A collective on its way; waiting for it counts."""

    def __init__(self, work: Any, clock: Clock) -> None:
        self._work = work
        self.wait = clock.timed(work.wait)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


CLOCK = Clock()
"""This rank's."""


def watch() -> None:
    """Count from here on; twice is once."""
    for name in NAMES:
        call = getattr(distributed, name, None)
        if call is not None and not hasattr(call, "is_timed"):
            timed: Any = CLOCK.timed(call)
            timed.is_timed = True
            setattr(distributed, name, timed)
