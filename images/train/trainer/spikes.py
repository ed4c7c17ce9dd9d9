"""Loss spikes: when one began, how far up it went, when it was over.

A loss is compared with the median of the last steps, in units of the median absolute deviation (Hampel's identifier:
neither minds a few wild values), and what is above adds up in a one-sided cumulative sum (Page 1954, "Continuous
inspection schemes") to which one step can add only so much: a bad batch or a heavy tail is no spike, three steps far
up are one, and so is a slow rise. All in logarithms, for the noise of a loss goes with its size.

While a spike lasts, nothing of it enters the medians. What it does not do: act (the launcher tells people), or see
what is not finite (the loop stops at that).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass
from statistics import median

USUAL_STEPS, RECENT_STEPS = 32, 7
"""The usual loss is the median of so many last steps: of the many, or of the few where it falls."""

SPREAD_STEPS = 64
"""The scale comes from so many last distances to the recent median."""

WARM_STEPS = 32
"""Nothing is called a spike before so many distances are known."""

SLACK, BOUND, PROOF = 2.0, 6.0, 12.0
"""Each step adds its scales above the usual, at most BOUND of them, less SLACK; a sum of PROOF is a spike."""

WITNESS_SCALES, WITNESSED_SLACK = 3.0, 1.0
"""A gradient so far up bears witness: of a loss that is up as well, less is taken off."""

FLOOR, LEAST_SCALE = 0.02, 0.005
"""Losses are compared by the logarithm of loss + FLOOR, in nats, and a scale is at least this: where noise or the loss
itself is tiny, so are most rises."""

CALM_STEPS = 5
"""A spike is over after so many steps in a row that are no longer above."""

PATIENCE_STEPS = 100
"""A spike that lasts longer is the new usual."""

_NORMAL = 1.4826  # the median absolute deviation of normal noise, times this, is its standard deviation


@dataclass(frozen=True)
class Spike:
    """The loss has gone up: seen at `step`, on its way since `began`.

    `usual` is the loss it left, `scales` how far it is above it in units of its noise; `gradient_scales` says the same
    of the logarithm of the gradient's norm (0 where that is as usual).
    """

    step: int
    began: int
    loss: float
    usual: float
    scales: float
    gradient_scales: float


@dataclass(frozen=True)
class Over:
    """The spike that began at `began` is over; `peak` was its highest loss.

    Not `recovered`: the loss has stayed up for `PATIENCE_STEPS`, which from here on is the usual.
    """

    step: int
    began: int
    peak: float
    recovered: bool


class Spikes:
    """Watches one training; memory is four windows. Deterministic: the same losses give the same verdicts."""

    def __init__(self) -> None:
        self._spike: Spike | None = None
        self._usual, self._scale, self._peak, self._calm = 0.0, 0.0, 0.0, 0
        self._forget()

    def _forget(self) -> None:
        self._long, self._short = _Window(USUAL_STEPS), _Window(RECENT_STEPS)
        self._distances = _Window(SPREAD_STEPS)
        self._gradients: deque[float] = deque(maxlen=SPREAD_STEPS)
        self._proof, self._rising = 0.0, 0

    def see(self, step: int, loss: float, grad_norm: float) -> Spike | Over | None:
        """Take in a finished step, each once and in order; what has begun or ended with it, mostly None.

        `loss` and `grad_norm` (before clipping) are finite.
        """
        place, gradient = math.log(max(loss, 0.0) + FLOOR), math.log(max(grad_norm, 1e-12))
        if self._spike is not None:
            return self._watch(self._spike, step, loss, place)
        if len(self._distances) >= WARM_STEPS and self._rises(step, loss, place, gradient):
            above, witness = (place - self._usual) / self._scale, self._witness(gradient)
            self._spike = Spike(step, self._rising, loss, math.exp(self._usual) - FLOOR, above, witness)
            self._calm = 0
            return self._spike
        self._gradients.append(gradient)
        if len(self._short):
            self._distances.push(place - self._short.median)
        self._long.push(place)
        self._short.push(place)
        return None

    def _rises(self, step: int, loss: float, place: float, gradient: float) -> bool:
        # Few steps follow a steep fall, but would follow a slow rise as well; many stay where they were.
        self._usual = min(self._long.median, self._short.median)
        self._scale = max(_NORMAL * self._distances.deviation(self._distances.median), LEAST_SCALE)
        above = (place - self._usual) / self._scale
        witnessed = above > WITNESSED_SLACK and self._witness(gradient) > WITNESS_SCALES
        if self._proof == 0:
            self._rising, self._peak = step, loss
        self._peak = max(self._peak, loss)
        self._proof = max(0.0, self._proof + min(above, BOUND) - (WITNESSED_SLACK if witnessed else SLACK))
        return self._proof >= PROOF

    def _witness(self, gradient: float) -> float:
        centre = median(self._gradients)
        scale = _NORMAL * median(abs(value - centre) for value in self._gradients)
        return (gradient - centre) / max(scale, LEAST_SCALE)

    def _watch(self, spike: Spike, step: int, loss: float, place: float) -> Over | None:
        self._peak = max(self._peak, loss)
        self._calm = self._calm + 1 if place - self._usual <= SLACK * self._scale else 0
        recovered = self._calm >= CALM_STEPS
        if not recovered and step - spike.began < PATIENCE_STEPS:
            return None
        self._spike, self._proof = None, 0.0
        if not recovered:
            self._forget()
        return Over(step, spike.began, self._peak, recovered)


class _Window:
    """The last values, also in order of size."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._arrived: deque[float] = deque()
        self._ordered: list[float] = []

    def __len__(self) -> int:
        return len(self._ordered)

    def push(self, value: float) -> None:
        """Add a value; the oldest leaves when there are more than `size`."""
        self._arrived.append(value)
        insort(self._ordered, value)
        if len(self._arrived) > self._size:
            del self._ordered[bisect_left(self._ordered, self._arrived.popleft())]

    @property
    def median(self) -> float:
        """The middle value, the upper of two."""
        return self._ordered[len(self._ordered) // 2]

    def deviation(self, centre: float) -> float:
        """The median of the distances to `centre`, without looking at all of them.

        The nearer half lies side by side in `_ordered`; its start is where the far ends of both sides balance.
        """
        ordered = self._ordered
        half = len(ordered) // 2
        low, high = 0, len(ordered) - half - 1
        while low < high:
            start = (low + high) // 2
            if centre - ordered[start] > ordered[start + half] - centre:
                low = start + 1
            else:
                high = start
        reach = max(centre - ordered[low], ordered[low + half] - centre)
        return min(reach, centre - ordered[low - 1]) if low else reach
