"""Ranks that are there and do nothing: no step comes, and no processor time goes by.

A job may say "running" for hours like that: a rank waits for a store that does not answer, or for another rank. The
watchdog for silence ends such a launch in the end; its patience is long where steps are, and at the start. This tells
at once where to look.

What it does not do: see a rank that waits by spinning, or end anything.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

IDLE_SECONDS = 60.0
"""For so long no step came and no rank computed."""

LEAST_SHARE = 0.03
"""Of a processor: who uses less computes nothing. A rank that only waits looks up now and then."""

EVERY_SECONDS = 5.0
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Stood:
    """What the kernel says of a process: seconds of processor time so far, its state, the call that it sleeps in."""

    seconds: float
    state: str
    call: str

    @property
    def where(self) -> str:
        """For a person."""
        held = {"T": "held by a signal", "t": "held by a debugger", "D": "waiting for a disk", "Z": "ended"}
        said = held.get(self.state, "asleep" if self.state == "S" else f"in state {self.state}")
        return f"{said} in {self.call}" if self.call not in ("", "0") else said


@dataclass(frozen=True)
class Idle:
    """For `seconds` no step came and rank `rank`, the one to look at, used `share` of a processor; `over` at a step."""

    rank: int
    seconds: float
    share: float
    where: str
    over: bool = False


class Idleness:
    """Watches the ranks of one launch, by the numbers of their processes."""

    def __init__(self, look: Callable[[int], Stood | None] | None = None) -> None:
        self._look = look or stand
        self._looked = 0.0
        self._since: float | None = None
        self._first: list[Stood] = []
        self._told = False

    def stepped(self) -> Idle | None:
        """A step has come; whether they had been idle before it."""
        self._since = None
        told, self._told = self._told, False
        return Idle(0, 0.0, 0.0, "", over=True) if told else None

    def see(self, now: float, processes: Sequence[int]) -> Idle | None:
        """Look at the processes, in the order of the ranks; told once for as long as no step comes."""
        if now - self._looked < EVERY_SECONDS or self._told:
            return None
        self._looked = now
        stood = [found for process in processes if (found := self._look(process)) is not None]
        if len(stood) < len(processes):  # somebody has ended: that is told by others
            return None
        if self._since is None or len(self._first) != len(stood):
            self._since, self._first = now, stood
            return None
        used = [after.seconds - before.seconds for before, after in zip(self._first, stood, strict=True)]
        passed = now - self._since
        if passed < IDLE_SECONDS:
            return None
        if max(used) >= LEAST_SHARE * passed:
            self._since, self._first = now, stood
            return None
        # The others wait for whom something holds; of those who are alike, for whoever did least.
        rank = min(range(len(stood)), key=lambda one: (stood[one].state == "S", used[one]))
        self._told = True
        return Idle(rank, passed, used[rank] / passed, stood[rank].where)


def stand(process: int) -> Stood | None:
    """Where a process stands; None when it is gone."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()
        call = Path(f"/proc/{process}/wchan").read_text(errors="replace").strip()
    except OSError:
        return None
    return Stood((int(fields[11]) + int(fields[12])) / _TICKS, fields[0], call)
