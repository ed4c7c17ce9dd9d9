"""Alarms on where a training's time goes: when too much of it is lost for long, why, and what to try.

One rule a figure. A rule looks at a window of steps together, speaks once, and once more when it is over; what is lost
must also be worth somebody's while (`LEAST_SECONDS` a step). What they do not do: act.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WINDOW_STEPS, SETTLE_STEPS = 50, 5
"""So many steps are looked at together; the first of a launch are not (caches, allocators)."""

EVERY_STEPS = 10
"""A window hardly moves in a step."""

CALM = 0.9
"""It is over when the figure is this part of its limit: one that hovers there does not speak again and again."""

LEAST_SECONDS = 0.01

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Rule:
    """`lost` gives the seconds that a step lost, of its `seconds`; above `limit`, as a share, there is an alarm."""

    name: str
    limit: float
    lost: Callable[[Record], float]
    what: str
    remedy: str


RULES = (
    Rule(
        "communication", 0.20, lambda record: record["communication"] + record["wait"],
        "of the time ranks talk to each other, or wait for the slowest to do so",
        "raise train.micro_batch or train.accumulation, so that they talk less often; or lower train.zero_stage; "
        "where a slow rank is named, begin there",
    ),
    Rule(
        "data", 0.05, lambda record: record["data"], "of the time ranks wait for data",
        "put the dataset on the machine's own disk (REFIT_CACHE), or give it more memory to keep it in",
    ),
    Rule(
        "utilisation", 0.20, lambda record: record["seconds"] * (1 - record["utilisation"]),
        "of the time the card does nothing",
        "raise train.micro_batch as far as its memory allows, and look at what else the step's time goes to",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Alarm:
    """A rule's figure over the last steps, as a share of their time; `over` when it is as it should be again."""

    name: str
    step: int
    share: float
    limit: float
    reason: str
    remedy: str
    over: bool = False

    def __str__(self) -> str:
        if self.over:
            return f"alarm over at step {self.step}: {self.share:.0%} {self.reason}"
        return f"{self.share:.0%} {self.reason} (step {self.step}; up to {self.limit:.0%} is usual). Try: {self.remedy}"


class Alarms:
    """Watches one launch by the records of one rank."""

    def __init__(self, rules: Sequence[Rule] = RULES) -> None:
        self._rules = rules
        self._rows: dict[str, deque[tuple[float, float]]] = {rule.name: deque(maxlen=WINDOW_STEPS) for rule in rules}
        self._raised: set[str] = set()
        self._seen = 0

    def see(self, step: int, record: Record) -> list[Alarm]:
        """Take in a step's record; what has begun or ended with it, mostly nothing."""
        self._seen += 1
        if self._seen <= SETTLE_STEPS:
            return []
        told = []
        for rule in self._rules:
            rows = self._rows[rule.name]
            try:
                rows.append((rule.lost(record), record["seconds"]))
            except KeyError:  # not measured here
                continue
            if len(rows) == WINDOW_STEPS and self._seen % EVERY_STEPS == 0:
                told += self._judge(rule, step, rows)
        return told

    def _judge(self, rule: Rule, step: int, rows: deque[tuple[float, float]]) -> list[Alarm]:
        lost, whole = (sum(column) for column in zip(*rows, strict=True))
        share, raised = lost / max(whole, 1e-9), rule.name in self._raised
        worth = lost / len(rows) >= LEAST_SECONDS
        if raised == (worth and share > rule.limit * (CALM if raised else 1.0)):
            return []
        self._raised ^= {rule.name}
        return [Alarm(rule.name, step, share, rule.limit, rule.what, rule.remedy, over=raised)]
