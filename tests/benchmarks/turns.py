"""Programs that take turns on the same processors, so that a busy neighbour slows all of them alike.

All are started, and all but one are held (SIGSTOP) at any moment. What each did in its turns is counted from outside,
by what it wrote.
"""

from __future__ import annotations

import math
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

SETTLE_SECONDS = 0.3
"""What a program may take to be under way again; not counted."""

LOOK_SECONDS = 0.001

START_SECONDS = 600.0


@dataclass
class Player:
    """A program with all that it starts, and a count of what it has done; `record` grows with each."""

    name: str
    process: subprocess.Popen[bytes]
    record: Path
    done: Callable[[], int]
    rates: list[float] = field(default_factory=list)
    """Done a second, in each of its turns."""

    def signal(self, number: signal.Signals) -> None:
        """To the program and all below it."""
        try:
            whole = psutil.Process(self.process.pid)
            for one in (whole, *whole.children(recursive=True)):
                os.kill(one.pid, number)
        except (psutil.NoSuchProcess, ProcessLookupError):
            pass

    def ready(self, count: int = 3) -> None:
        """Wait until so much is done: what is loaded or warmed up at first use is nobody's speed."""
        deadline = time.monotonic() + START_SECONDS
        while self.done() < count:
            assert self.process.poll() is None, f"{self.name} ended: {self.process.returncode}"
            assert time.monotonic() < deadline, f"{self.name} did not begin"
            time.sleep(0.05)

    def next(self) -> tuple[int, float]:
        """Wait until it has just done one more; how many there are, and when that was."""
        before = self.record.stat().st_size
        while self.record.stat().st_size == before:
            assert self.process.poll() is None, f"{self.name} ended under way"
            time.sleep(LOOK_SECONDS)
        now = time.perf_counter()
        return self.done(), now

    def end(self) -> None:
        """Kill it, with all below it."""
        self.signal(signal.SIGKILL)
        self.process.wait()


def play(players: Sequence[Player], turns: int, seconds: float) -> None:
    """So many turns of so many seconds each; every round begins with another player."""
    for player in players:
        player.ready()
        player.signal(signal.SIGSTOP)
    for turn in range(turns):
        for player in (*players[turn % len(players) :], *players[: turn % len(players)]):
            player.signal(signal.SIGCONT)
            time.sleep(SETTLE_SECONDS)
            before, began = player.next()  # a turn is from one to another, for it holds few of them
            time.sleep(seconds)
            after, ended = player.next()
            player.rates.append((after - before) / (ended - began))
            player.signal(signal.SIGSTOP)


def ratio(one: Player, other: Player) -> tuple[float, float]:
    """`one`'s rate as a share of `other`'s over all rounds, and its standard error by leaving out one round at a time
    (the jackknife; Tukey 1958)."""
    rounds = list(zip(one.rates, other.rates, strict=True))
    whole = _share(rounds)
    without = [_share(rounds[:at] + rounds[at + 1 :]) for at in range(len(rounds))]
    return whole, math.sqrt((len(rounds) - 1) * statistics.pvariance(without))


def _share(rounds: list[tuple[float, float]]) -> float:
    return sum(mine for mine, _ in rounds) / sum(theirs for _, theirs in rounds)
