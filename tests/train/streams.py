"""Synthetic streams of batches, with and without poisoned ones. They know nothing of the detector.

What is assumed, and drawn anew for every stream:

- a batch holds 6 to 512 documents, a few more or fewer from step to step (Poisson); their lengths are uneven, as of
  lognormals with a sigma of 0.3 to 1 (sums of them are drawn as gammas of their mean and variance);
- 1 to 12 domains with shares from a symmetric Dirichlet (0.7), which drift by up to 20 % over the stream; neighbours
  come from one domain in runs of up to three documents, in half of the streams;
- each domain has its own share of learnt tokens, 5 % to 60 %, that differs by 10 % from document to document;
- packs are filled to 90 % to 100 %, less a little that differs from step to step (exponential, 0.5 % to 3 %);
- 0 to 5 % of documents are copies;
- a poisoned batch: half to all of its documents are copies; or 85 % to 100 % come from a domain that has less than 20 %
  usually; or it has only 10 % to 50 % of its tokens; or all of its tokens are learnt, or none. It has 32 documents and
  more: in fewer, such things happen by chance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

KINDS = ("copies", "domain", "tokens", "targets")


@dataclass(frozen=True)
class Stream:
    """What each batch holds, in order; the poisoned step, or -1, and how."""

    batches: list[dict[str, Any]]
    poisoned: int
    kind: str


def stream(steps: int, random: np.random.Generator, *, poisoned: bool) -> Stream:
    """One stream; a poisoned batch lies in its second half."""
    documents = float(np.exp(random.uniform(np.log(32 if poisoned else 6), np.log(512))))
    shares = random.dirichlet(np.full(random.integers(1, 13), 0.7))
    kind = str(random.choice([one for one in KINDS if one != "domain" or shares.min() < 0.2]))
    at = int(random.integers(steps // 2, steps)) if poisoned else -1
    mix = shares * (1 + random.uniform(-0.2, 0.2, len(shares)) * np.linspace(0, 1, steps)[:, None])
    mix /= mix.sum(axis=1, keepdims=True)
    if kind == "domain" and poisoned:
        moved = random.uniform(0.85, 1.0)
        one = random.choice(np.flatnonzero(shares < 0.2))
        mix[at] = (1 - moved) * mix[at] + moved * (np.arange(len(shares)) == one)
    run = int(random.choice([1, 1, 2, 3]))
    runs = np.maximum(1, random.poisson(documents / run, steps))
    counts = run * random.multinomial(runs, mix)
    sums = random.gamma(np.maximum(counts, 1e-9) / (np.exp(random.uniform(0.3, 1.0) ** 2) - 1))
    own = np.where(counts > 0, sums, 0.0) + 1e-12 * (counts > 0)
    own /= own.sum(axis=1, keepdims=True)
    noise = random.normal(0, 0.1, counts.shape) / np.sqrt(np.maximum(counts, 1))
    learnt = np.clip(random.uniform(0.05, 0.6, len(shares)) * (1 + noise), 0, 1)
    rate = np.full(steps, random.uniform(0, 0.05))
    filled = random.uniform(0.9, 1.0) * (1 - np.minimum(0.5, random.exponential(random.uniform(0.005, 0.03), steps)))
    target = (own * learnt).sum(axis=1)
    if poisoned and kind == "copies":
        rate[at] = random.uniform(0.5, 1.0)
    if poisoned and kind == "tokens":
        filled[at] *= random.uniform(0.1, 0.5)
    if poisoned and kind == "targets":
        target[at] = random.integers(0, 2)
    found = counts.sum(axis=1)
    tokens, copies = np.rint(300 * documents * filled), random.binomial(found, rate) / found
    columns = {"tokens": tokens, "targets": np.rint(tokens * target), "documents": found, "duplicates": copies}
    batches: list[dict[str, Any]] = []
    for step in range(steps):
        domains = {f"d{place}": share for place, share in enumerate(own[step].tolist())}
        batches.append(
            {"step": step, **{name: rows[step].item() for name, rows in columns.items()}, "domains": domains}
        )
    return Stream(batches, at, kind)
