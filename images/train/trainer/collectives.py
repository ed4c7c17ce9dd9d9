"""How long a rank is in collectives: what it sends and receives, and what it waits for the others there.

DeepSpeed's backend looks torch.distributed's functions up by name, or keeps them from when it is made; so they are
wrapped where they are looked up, before an engine is made. A call that returns at once is timed again where its handle
is waited for.

What is measured: how long the rank's own course of work is held up by a collective (`device.mark`). On a processor
(gloo) that is all of it, on a card (NCCL) what of it does not run beside the computing. The waiting for a slower rank
counts too: who is slow shows in the others' communication.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import distributed

from trainer import device
from trainer.device import Mark

NAMES = (
    "all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_into_tensor", "all_gather_object",
    "all_gather_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor", "broadcast", "broadcast_object_list",
    "all_to_all_single", "all_to_all", "barrier", "gather", "scatter",
)  # fmt: skip


class Clock:
    """Collectives from when somebody begins to listen; one within another counts once."""

    def __init__(self) -> None:
        self._heard: list[tuple[Mark, Mark]] | None = None
        self._inside = False

    def listen(self) -> None:
        """Begin to listen."""
        self._heard = []

    def heard(self) -> list[tuple[Mark, Mark]]:
        """Begin and end of each since then, and no more of them; nothing where nobody listened."""
        heard, self._heard = self._heard or [], None
        return heard

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, its time counted."""

        @functools.wraps(call)
        def inner(*args: Any, **kwargs: Any) -> Any:
            heard = self._heard
            if self._inside or heard is None:
                return call(*args, **kwargs)
            self._inside, began = True, device.mark()
            try:
                answer = call(*args, **kwargs)
            finally:
                self._inside = False
                heard.append((began, device.mark()))
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
