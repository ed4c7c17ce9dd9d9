"""Batches unlike the others, told before they are learnt from: by copies, tokens, targets, and shares of domains.

Tokens are odd when their logarithm lies `SCALES` robust scales (median absolute deviations, made comparable to a
standard deviation) from the median of the last steps. A share is odd when it is `LEAST_SHARE` away from its median and
draws at the usual rate would hardly ever come so far: at most `exp(-SURPRISE)`, by relative entropy (Chernoff's bound).
Of how many draws a batch consists is taken from how much the share varied, and is never more than its documents: a
bound that holds for few documents, of uneven length, whose neighbours are alike, where counting deviations does not. A
batch without targets is always odd where there were always some.

What is assumed: batches are drawn at random from one mixture, that drifts slowly. An odd batch does not enter the
windows; after `PATIENCE_STEPS` of them in a row they are the usual. What it does not do: look at the text, act, or see
poison that is spread evenly over all batches.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

USUAL_STEPS, WARM_STEPS = 96, 48
"""The usual is the median of so many last steps; nothing is odd before so many are known."""

REFRESH_STEPS = 8
"""Medians are taken anew so often: they hardly move, and this is cheap."""

SCALES, LEAST_SCALE = 10.0, 0.05
"""Tokens are odd from so many scales on; one is at least this, in nats."""

SURPRISE, TARGETS_SURPRISE = 20.0, 40.0
"""A share is odd at a chance of exp(-SURPRISE). That of targets is no count of draws, and its tails are heavier."""

LEAST_SHARE = 0.15
"""And from so far on; for targets half of the usual will do, if that is less."""

TOLD, PATIENCE_STEPS = 3, 16
"""Of odd batches in a row the first are told; so many are the new usual."""

TOKENS, TARGETS, DOMAINS = 0, 1, 3
"""Where these figures stand among a batch's; domains are the last."""

_NORMAL = 1.4826  # the median absolute deviation of normal noise, times this, is its standard deviation


@dataclass(frozen=True)
class Odd:
    """One figure of a batch: `what` it is of, what it was, and what is usual."""

    what: str
    value: float
    usual: float

    def __str__(self) -> str:
        if self.what == "tokens":
            return f"{self.value:,.0f} tokens, usually {self.usual:,.0f}"
        name = {"duplicates": "documents that came before", "targets": "tokens that are learnt"}.get(
            self.what, f"tokens of the domain {self.what.removeprefix('domain ')}"
        )
        return f"{self.value:.0%} {name}, usually {self.usual:.0%}"


class OddBatches:
    """Watches one training. Deterministic; memory is `USUAL_STEPS` rows."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._rows: deque[NDArray[np.float64]] = deque(maxlen=USUAL_STEPS)
        self._since, self._row = 0, 0
        self._scale = LEAST_SCALE
        self._centre = self._rate = self._draws = self._least = self._reach = np.zeros(0)

    def see(self, batch: Mapping[str, Any]) -> list[Odd]:
        """Take in what a batch holds (`Contents.of`, its `tokens` and `targets`); what is odd of it, mostly nothing."""
        values = self._values(batch)
        odd = self._judge(values, batch["documents"]) if len(self._rows) >= WARM_STEPS else []
        if odd:
            self._row += 1
            if self._row < PATIENCE_STEPS:
                return odd if self._row <= TOLD else []
            self._rows.clear()
        self._row, self._since = 0, self._since + 1
        self._rows.append(values)
        if len(self._rows) >= WARM_STEPS and (self._since % REFRESH_STEPS == 0 or len(self._rows) == WARM_STEPS):
            self._learn()
        return []

    def _values(self, batch: Mapping[str, Any]) -> NDArray[np.float64]:
        tokens = max(1, int(batch["tokens"]))
        known = {"tokens": math.log(tokens), "targets": batch["targets"] / tokens, "duplicates": batch["duplicates"]}
        known |= {f"domain {name}": share for name, share in batch.get("domains", {}).items()}
        if list(known) != self._names:
            self._names = list(known)
            self._rows.clear()
        return np.array(list(known.values()), dtype=np.float64)

    def _learn(self) -> None:
        rows = np.array(self._rows)
        self._centre, self._least = np.median(rows, axis=0), rows.min(axis=0)
        self._scale = max(_NORMAL * float(np.median(np.abs(rows[:, TOKENS] - self._centre[TOKENS]))), LEAST_SCALE)
        self._rate = np.clip(rows.mean(axis=0), 1 / len(rows), 1 - 1 / len(rows))
        drawn, varied = self._rate * (1 - self._rate), np.maximum(rows.var(axis=0), 1e-9)
        self._draws = drawn / varied
        if len(self._names) > DOMAINS:  # together: one alone that was hardly ever there tells nothing
            self._draws[DOMAINS:] = drawn[DOMAINS:].sum() / varied[DOMAINS:].sum()
        self._reach = np.full(len(self._names), LEAST_SHARE)
        self._reach[TARGETS] = min(LEAST_SHARE, self._centre[TARGETS] / 2)
        self._reach[TOKENS] = SCALES * self._scale

    def _judge(self, values: NDArray[np.float64], documents: int) -> list[Odd]:
        far = np.flatnonzero(np.abs(values - self._centre) > self._reach)  # nearly always none
        return [self._odd(place, float(values[place])) for place in far if self._surprises(place, values, documents)]

    def _surprises(self, place: int, values: NDArray[np.float64], documents: int) -> bool:
        value, rate, draws = float(values[place]), float(self._rate[place]), float(self._draws[place])
        if place == TOKENS:
            return True
        if place == TARGETS:
            return (value == 0 < self._least[place]) or draws * _entropy(value, rate) > TARGETS_SURPRISE
        return min(documents, draws) * _entropy(value, rate) > SURPRISE

    def _odd(self, place: int, value: float) -> Odd:
        usual, name = float(self._centre[place]), self._names[place]
        return Odd(name, math.exp(value), math.exp(usual)) if place == TOKENS else Odd(name, value, usual)


def _entropy(share: float, rate: float) -> float:
    """Relative entropy of drawing a share at a rate, in nats."""
    inner = share * math.log(share / rate) if share > 0 else 0.0
    outer = (1 - share) * math.log((1 - share) / (1 - rate)) if share < 1 else 0.0
    return inner + outer
