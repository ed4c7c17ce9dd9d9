"""Where a step's time goes: its parts, one after the other on the rank's device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trainer import device
from trainer.collectives import CLOCK
from trainer.device import Mark

COMPUTED = frozenset({"forward", "backward", "optimizer"})
"""Parts in which DeepSpeed has the ranks talk to each other; `communication` is told apart from them."""

Between = tuple[Mark, Mark]


class Parts:
    """The parts since they were last taken. None lies within another."""

    def __init__(self) -> None:
        self._past: list[tuple[str, Between, list[Between]]] = []

    @contextmanager
    def clock(self, name: str) -> Iterator[None]:
        """What is done within is a part, or more of one."""
        if name in COMPUTED:
            CLOCK.listen()
        began = device.mark()
        try:
            yield
        finally:
            self._past.append((name, (began, device.mark()), CLOCK.heard()))

    def take(self) -> dict[str, float]:
        """Seconds by part; waits until the device has come so far."""
        device.synchronize()
        past, self._past = self._past, []
        spent: dict[str, float] = {}
        for name, (began, ended), inside in past:
            seconds = ended - began
            if name in COMPUTED:
                talked = sum(end - begin for begin, end in inside)
                spent["communication"] = spent.get("communication", 0.0) + talked
                seconds -= talked
            spent[name] = spent.get(name, 0.0) + seconds
        return spent
