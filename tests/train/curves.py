"""Synthetic loss curves, with and without planted spikes. They know nothing of the detector.

What is assumed, and drawn anew for every curve (all sizes relative to the level of the loss at that step):

- level: 0.7 to 11 at the start, falling to 2 % to 80 % of that, exponentially or like a power law, within 3 % to 60 %
  of the run, after a warm-up of 0 to 40 steps at the start's level; then a drift of up to 10 % of it, up or down;
- noise: 0.3 % to 8 % of the level, Student's t with 3 to 30 degrees of freedom (its core has the scale that is meant),
  correlated from step to step by 0 to 0.5; the scale wanders by up to threefold over the run and jumps once, in half
  of the curves, by up to threefold either way;
- bad batches: up to three in a thousand steps are 5 to 20 scales up, for this one step;
- epochs: up to four borders, where the loss drops by up to 15 % or, once in five, rises by up to 2 scales;
- gradients: lognormal noise of 10 % to 40 %, falling slowly; up to tenfold in a bad batch, and in five of a thousand
  other steps; 1.5 to 20 times as large at the top of three of four spikes, as ever in the fourth;
- spikes: a jump that decays with a time of 5 to 60 steps, a ramp of 5 to 30 steps and such a decay, or a jump that
  stays. The top stands above the level of 20 steps before the start (else one sees a flat place in a falling curve,
  no spike) by 10 % to 100 % of the level or 8 to 60 scales of the noise, whichever is more.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
SHAPES = ("jump", "ramp", "plateau")


@dataclass(frozen=True)
class Curves:
    """Curves of one length. `loss`, `grad_norm`, `planted` (what spikes add, in scales): (curves, steps).

    `start` is a spike's first step, -1 where there is none; `due` the step by which it stands at its full height.
    """

    loss: Floats
    grad_norm: Floats
    planted: Floats
    start: NDArray[np.int64]
    due: NDArray[np.int64]


def curves(count: int, steps: int, random: np.random.Generator, *, spiked: float = 0.5) -> Curves:
    """`count` curves of `steps` steps, a share of them with one spike each."""
    level = _level(count, steps, random)
    scale = level * _scales(count, steps, random)
    noise = _noise(count, steps, random)
    bad = random.random((count, steps)) < random.uniform(0, 0.003, (count, 1))
    noise += bad * random.uniform(5, 20, (count, steps))
    start, due, shape = _spikes(count, steps, random, spiked)
    rows = np.arange(count)
    at, top = np.maximum(start, 0), np.clip(due, 0, steps - 1)
    height = np.maximum(
        random.uniform(0.1, 1.0, count) * level[rows, at],
        np.exp(random.uniform(np.log(8), np.log(60), count)) * scale[rows, at],
    )
    height += np.maximum(level[rows, np.maximum(at - 20, 0)] - level[rows, top], 0)
    planted = height[:, None] * shape
    gradient = _gradients(count, steps, random)
    gradient[bad] *= random.uniform(1, 10, bad.sum())
    louder = np.where(random.random(count) < 0.75, random.uniform(1.5, 20, count), 1.0)
    gradient *= 1 + (louder[:, None] - 1) * shape
    return Curves(np.maximum(level + noise * scale, 0.2 * level) + planted, gradient, planted / scale, start, due)


def _level(count: int, steps: int, random: np.random.Generator) -> Floats:
    first = np.exp(random.uniform(np.log(0.7), np.log(11), (count, 1)))
    last = first * np.exp(random.uniform(np.log(0.02), np.log(0.8), (count, 1)))
    time = np.maximum(np.arange(steps) - random.integers(0, 40, (count, 1)), 0) / steps
    tau = np.exp(random.uniform(np.log(0.03), np.log(0.6), (count, 1)))
    fall = np.where(random.random((count, 1)) < 0.5, np.exp(-time / tau), (1 + time / tau) ** -1.5)
    level = last + (first - last) * fall
    level *= 1 + random.uniform(-0.1, 0.1, (count, 1)) * np.linspace(0, 1, steps)
    for _ in range(4):
        border = random.integers(0, 2 * steps, (count, 1))  # half of them after the end: none
        level *= np.where(np.arange(steps) >= border, 1 - random.uniform(0, 0.15, (count, 1)), 1.0)
    return np.asarray(level)


def _scales(count: int, steps: int, random: np.random.Generator) -> Floats:
    scale = np.exp(random.uniform(np.log(0.003), np.log(0.08), (count, 1)))
    phase, turns = random.uniform(0, 2 * np.pi, (count, 1)), random.uniform(0.2, 2, (count, 1))
    scale = scale * np.exp(
        random.uniform(0, np.log(3) / 2, (count, 1)) * np.sin(phase + 2 * np.pi * turns * np.linspace(0, 1, steps))
    )
    jump = np.exp(random.uniform(-np.log(3), np.log(3), (count, 1)))
    border = random.integers(0, 2 * steps, (count, 1))
    return np.asarray(scale * np.where(np.arange(steps) >= border, jump, 1.0))


def _noise(count: int, steps: int, random: np.random.Generator) -> Floats:
    white = random.standard_t(random.choice([3, 4, 6, 30], (count, 1)), (count, steps))
    kept = random.uniform(0, 0.5, count)
    noise = np.empty_like(white)
    noise[:, 0] = white[:, 0]
    for step in range(1, steps):
        noise[:, step] = kept * noise[:, step - 1] + np.sqrt(1 - kept**2) * white[:, step]
    # Once in five borders of an epoch the loss goes up a little: within its noise.
    border = random.integers(0, 2 * steps, (count, 1))
    rise = np.where(random.random((count, 1)) < 0.4, random.uniform(0, 2, (count, 1)), 0.0)
    return np.asarray(noise + np.where(np.arange(steps) >= border, rise, 0.0))


def _gradients(count: int, steps: int, random: np.random.Generator) -> Floats:
    norm = np.exp(random.normal(0, 1, (count, steps)) * random.uniform(0.1, 0.4, (count, 1)))
    norm *= np.exp(random.uniform(-2, 2, (count, 1)) - random.uniform(0, 1, (count, 1)) * np.linspace(0, 1, steps))
    alone = random.random((count, steps)) < 0.005
    return np.asarray(norm * np.where(alone, random.uniform(2, 10, (count, steps)), 1.0))


def _spikes(
    count: int, steps: int, random: np.random.Generator, spiked: float
) -> tuple[NDArray[np.int64], NDArray[np.int64], Floats]:
    has = random.random(count) < spiked
    start = np.where(has, random.integers(max(80, steps // 10), steps - 60, count), -1)
    kind = random.integers(0, len(SHAPES), count)
    ramp = np.where(kind == SHAPES.index("ramp"), random.integers(5, 31, count), 1)
    fade = np.where(kind == SHAPES.index("plateau"), np.inf, np.exp(random.uniform(np.log(5), np.log(60), count)))
    since = np.arange(steps) - start[:, None]
    shape = np.minimum((since + 1) / ramp[:, None], np.exp(-(since - ramp[:, None] + 1) / fade[:, None]))
    return start, start + ramp, np.where(has[:, None] & (since >= 0), np.minimum(shape, 1.0), 0.0)
