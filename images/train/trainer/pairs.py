"""Batches of preference pairs: a pack's segments 2 n - 1 and 2 n are the two sides of one pair."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from refit.packed import WHOLE, Packed
from refit.spec import Train
from trainer.batches import Batch, Loader, Step, to_batch
from trainer.reference import Reference

Index = NDArray[np.int64]


class PairLoader(Loader):
    """The packs of a training on pairs. A step's weight is that of its pairs, each as much as its chosen answer.

    `reference` has what the reference model says of them, where that is not asked at each step; `watched` likewise of
    the validation split.
    """

    def __init__(
        self, split: Packed, train: Train, *, rank: int, ranks: int, reference: Reference | None = None,
        watched: Reference | None = None,
    ) -> None:  # fmt: skip
        super().__init__(split, train, rank=rank, ranks=ranks)
        self._reference, self.watched = reference, watched

    def step(self, number: int) -> Step:
        """Step `number` (from 0)."""
        step = super().step(number)
        weights = pair_weights(self.split.segments[step.packs], self.split.mask[step.packs])
        return replace(step, weight=int(weights.sum(dtype=np.int64)) / WHOLE or 1.0)

    def batch(self, packs: Index) -> Batch:
        """A batch of the given packs."""
        reference = self._reference.of(packs) if self._reference else None
        return to_pairs(self.split.tokens[packs], self.split.segments[packs], self.split.mask[packs], reference)


def to_pairs(
    tokens: NDArray[np.integer], segments: NDArray[np.integer], mask: NDArray[np.integer],
    reference: Tensor | None = None,
) -> Batch:  # fmt: skip
    """A batch from arrays of shape (packs, length) as `refit.packed` stores them; `reference` has shape (pairs, 2)."""
    learnt = mask[:, 1:] > 0
    sides = _first_side(segments)[:, None] + segments[:, 1:].astype(np.int64) - 1
    weights = pair_weights(segments, mask).astype(np.float32) / WHOLE
    return to_batch(tokens, segments, mask)._replace(
        weights=None, sides=torch.from_numpy(sides[learnt]), pairs=torch.from_numpy(weights), reference=reference
    )


def pair_weights(segments: NDArray[np.integer], mask: NDArray[np.integer]) -> NDArray[np.uint8]:
    """The weight of each pair in 255ths, pack by pack: what a token of its chosen answer weighs; all weigh the same."""
    weights = np.zeros(int(counts(segments).sum()), np.uint8)
    chosen = (segments % 2 == 1) & (mask > 0)
    pair = (_first_side(segments)[:, None] + segments.astype(np.int64) - 1) // 2
    weights[pair[chosen]] = mask[chosen]
    return weights


def counts(segments: NDArray[np.integer]) -> Index:
    """How many pairs each pack holds."""
    return np.asarray((segments.max(axis=1, initial=0).astype(np.int64) + 1) // 2)


def _first_side(segments: NDArray[np.integer]) -> Index:
    """The number of each pack's first side among all sides of the batch."""
    of_each = 2 * counts(segments)
    return np.asarray(np.cumsum(of_each) - of_each)
