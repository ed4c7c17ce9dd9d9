"""Step times of a cluster, one row a step, one column a node. They know nothing of the detector.

What is assumed (a step takes `STEP_SECONDS`, times are relative to a node's usual one):

- nodes differ by 3 %, wander by 3 % from step to step, and all drift by 10 % over a day (heat, clocks);
- packs are uneven: a node's share of a step has 25 % more or fewer tokens than the next one's, and time grows a little
  faster than tokens do (attention);
- garbage collection: once in 500 steps of a node, 0.2 to 1.5 step times more;
- a node's own hiccups: twenty a day in the cluster, 1 to 3 steps of 2 to 5 times;
- the storage's: ten a day, 1 to 20 steps in which everything takes 1.5 to 6 times as long, not the same everywhere
  (15 % from node to node for the whole time, 15 % from step to step);
- a save or an evaluation every 100 steps, 3 to 10 times as long, marked; the step after it takes half as long again;
- a slow node: twice as slow (one in five of them) to six times, from some step on or from the start.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NODES, STEP_SECONDS = 64, 10
STEPS_A_DAY = 86_400 // STEP_SECONDS
MARKED_EVERY = 100


@dataclass(frozen=True)
class Trace:
    """`seconds`, `tokens`: (steps, nodes); `marked`: (steps,); the slow node and its first slow step, or -1 and -1."""

    seconds: NDArray[np.float64]
    tokens: NDArray[np.float64]
    marked: NDArray[np.bool_]
    node: int
    since: int


def trace(steps: int, random: np.random.Generator, *, slow: bool) -> Trace:
    """So many steps of a cluster; with a node that becomes slow in the first half, or without one."""
    shape = (steps, NODES)
    tokens = 8192 * np.exp(random.normal(0, 0.25, shape))
    times = (tokens / 8192) ** 1.1 * np.exp(random.normal(0, 0.03, shape) + random.normal(0, 0.03, NODES))
    day = np.arange(steps) / STEPS_A_DAY
    times *= 1 + 0.1 * np.sin(2 * np.pi * (day + random.random()))[:, None]
    times += (random.random(shape) < 1 / 500) * random.uniform(0.2, 1.5, shape)
    for start in _times_a_day(20, steps, random):
        times[start : start + random.integers(1, 4), random.integers(NODES)] *= random.uniform(2, 5)
    for start in _times_a_day(10, steps, random):
        hung = times[start : start + random.integers(1, 21)]
        hung *= random.uniform(1.5, 6) * np.exp(random.normal(0, 0.15, NODES) + random.normal(0, 0.15, hung.shape))
    marked = np.arange(steps) % MARKED_EVERY == MARKED_EVERY - 1
    times[marked] *= random.uniform(3, 10, (marked.sum(), 1))
    times[1:][marked[:-1]] *= 1.5
    node, since = -1, -1
    if slow:
        node, since = int(random.integers(NODES)), int(random.integers(0, steps // 2)) * int(random.random() < 0.9)
        times[since:, node] *= 2.0 if random.random() < 0.2 else np.exp(random.uniform(np.log(2), np.log(6)))
    return Trace(STEP_SECONDS * times, tokens, marked, node, since)


def _times_a_day(count: int, steps: int, random: np.random.Generator) -> NDArray[np.int64]:
    return random.integers(0, steps, random.poisson(count * steps / STEPS_A_DAY))
