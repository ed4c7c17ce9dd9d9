"""Batches of preference pairs: a pack's segments 2 n - 1 and 2 n are the two sides of one pair."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from refit.packed import WHOLE, Packed
from refit.spec import Train
from trainer.batches import Batch, Loader, to_batch
from trainer.reference import Reference

Index = NDArray[np.int64]


class PairLoader(Loader):
    """The packs of a training on pairs. A step's weight is that of its pairs, each as much as its chosen answer.

    `reference` has what the reference model says of them, where that is not asked at each step; `watched` likewise of
    the validation split.
    """

    AHEAD = 1
    """The reference knows only the packs that are trained on: no step after the last one is made."""

    def __init__(
        self, split: Packed, train: Train, *, rank: int, ranks: int, reference: Reference | None = None,
        watched: Reference | None = None,
    ) -> None:  # fmt: skip
        super().__init__(split, train, rank=rank, ranks=ranks)
        self._reference, self.watched = reference, watched

    def _weigh(self, segments: NDArray[np.uint16], mask: NDArray[np.uint8]) -> list[int]:
        rows = (len(segments), -1, self.length)
        steps = zip(segments.reshape(rows), mask.reshape(rows), strict=True)
        return [int(pair_weights(*step).sum(dtype=np.int64)) for step in steps]

    def _batches(self, packs: Index, segments: NDArray[np.uint16], mask: NDArray[np.uint8]) -> Iterator[Batch]:
        for some, sides, learnt in zip(packs, segments, mask, strict=True):
            reference = self._reference.of(some) if self._reference else None
            yield to_pairs(self.split.tokens[some], sides, learnt, reference)


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
