"""From packs on the disk to the tensors of a step; which packs is `order`'s business."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from refit.packed import WHOLE, Packed, position_ids
from refit.spec import Train
from trainer.order import packs_at


class Batch(NamedTuple):
    """A micro batch.

    `select` marks the places whose next token is a target, `labels` are those tokens, row by row. `weights` are what
    they count in the loss, of the same shape, float32 from 0 to 1; None where each counts whole.

    Of preference pairs only: `sides` says for each label which side of which pair it is of (2 n or 2 n + 1), `pairs`
    what each pair weighs, float32, and `reference` what the reference model says of both sides, shape (pairs, 2); None
    where the model is asked itself.
    """

    tokens: Tensor
    positions: Tensor
    select: Tensor
    labels: Tensor
    weights: Tensor | None
    sides: Tensor | None = None
    pairs: Tensor | None = None
    reference: Tensor | None = None


@dataclass(frozen=True)
class Step:
    """What one optimizer step learns from; all but `batches`, one rank's share, is of all ranks.

    `weight` is what the targets (of preference pairs: the pairs) weigh together, by which their loss is divided; 1
    where there are none. `rank_tokens` and `rank_targets` are what each rank is given.
    """

    packs: NDArray[np.int64]
    tokens: int
    targets: int
    weight: float
    rank_tokens: list[int]
    rank_targets: list[int]
    batches: list[Batch]


class Loader:
    """The packs of a training, dealt out to the ranks.

    The micro batches of a step are the same on any number of ranks; rank r takes each `ranks`-th of them. So one rank
    and two see the same samples in the same step, and know what its targets weigh without asking each other.
    """

    AHEAD = 1 << 15
    """Small steps are made together, up to so many tokens: of little arrays it is the calls that take time."""

    def __init__(self, split: Packed, train: Train, *, rank: int, ranks: int) -> None:
        self.split, self._train, self._rank, self._ranks = split.plain(), train, rank, ranks
        if train.accumulation % ranks:
            raise ValueError(f"{train.accumulation} micro batches cannot be dealt out to {ranks} ranks")
        self._per_step = train.micro_batch * train.accumulation
        self._made: dict[int, Step] = {}

    @property
    def length(self) -> int:
        """Tokens in a pack."""
        return self.split.header.length

    @property
    def ranks(self) -> int:
        """Who share the micro batches."""
        return self._ranks

    @property
    def packs(self) -> int:
        """Packs in an epoch."""
        return self.split.header.packs

    @property
    def ahead(self) -> int:
        """So many steps are made together."""
        return max(1, self.AHEAD // (self._per_step * self.length))

    def packs_of(self, number: int, steps: int = 1) -> NDArray[np.int64]:
        """The packs of so many steps from `number` (from 0) on, of all ranks, in order; shape (steps, packs)."""
        places = np.arange(number * self._per_step, (number + steps) * self._per_step)
        return packs_at(places, packs=self.packs, seed=self._train.seed).reshape(steps, -1)

    def step(self, number: int) -> Step:
        """Step `number` (from 0)."""
        if number not in self._made:
            self._made = dict(enumerate(self._make(self.packs_of(number, self.ahead)), start=number))
        return self._made.pop(number)

    def batch(self, packs: NDArray[np.int64]) -> Batch:
        """A batch of the given packs."""
        return next(self._batches(packs[None], self.split.segments[packs][None], self.split.mask[packs][None]))

    def _make(self, packs: NDArray[np.int64]) -> Iterator[Step]:
        """The steps of packs of shape (steps, packs)."""
        train, steps, own = self._train, len(packs), self._train.accumulation // self._ranks
        dealt = packs.reshape(steps, own, self._ranks, train.micro_batch)
        segments, mask = self.split.segments[dealt], self.split.mask[dealt]
        tokens = np.count_nonzero(segments, axis=(1, 3, 4))
        targets = np.count_nonzero(mask[..., 1:], axis=(1, 3, 4))
        weights = self._weigh(segments, mask)
        mine = (steps * own, train.micro_batch, -1)
        batches = self._batches(
            dealt[:, :, self._rank].reshape(steps * own, -1), segments[:, :, self._rank].reshape(mine),
            mask[:, :, self._rank].reshape(mine),
        )  # fmt: skip
        for number in range(steps):
            yield Step(
                packs=packs[number],
                tokens=int(tokens[number].sum()),
                targets=int(targets[number].sum()),
                weight=weights[number] / WHOLE or 1.0,
                rank_tokens=tokens[number].tolist(),
                rank_targets=targets[number].tolist(),
                batches=list(islice(batches, own)),
            )

    def _weigh(self, _segments: NDArray[np.uint16], mask: NDArray[np.uint8]) -> list[int]:
        """What the targets of each step weigh, in 255ths; the arrays' first dimension is the steps."""
        weights: list[int] = mask[..., 1:].reshape(len(mask), -1).sum(axis=1, dtype=np.int64).tolist()
        return weights

    def _batches(
        self, packs: NDArray[np.int64], segments: NDArray[np.uint16], mask: NDArray[np.uint8]
    ) -> Iterator[Batch]:
        """Batches of packs of shape (batches, packs); the arrays' shape is (batches, packs, length)."""
        return to_batches(self.split.tokens[packs.ravel()], segments, mask)


def to_batch(tokens: NDArray[np.integer], segments: NDArray[np.integer], mask: NDArray[np.integer]) -> Batch:
    """A batch from arrays of shape (packs, length) as `refit.packed` stores them."""
    return next(to_batches(tokens, segments[None], mask[None]))


def to_batches(
    tokens: NDArray[np.integer], segments: NDArray[np.integer], mask: NDArray[np.integer]
) -> Iterator[Batch]:
    """Batches that are made in one go.

    Args:
        tokens: of shape (batches x packs, length).
        segments: of shape (batches, packs, length), as `mask`.
    """
    count, packs, length = segments.shape
    ids = tokens.astype(np.int64)
    target = (mask > 0).reshape(-1, length)
    select = np.zeros_like(target)
    select[:, :-1] = target[:, 1:]
    labels = ids[:, 1:][target[:, 1:]]
    weights = mask.reshape(-1, length)[:, 1:][target[:, 1:]]
    ends = np.count_nonzero(select.reshape(count, -1), axis=1).cumsum().tolist()
    positions = position_ids(segments.reshape(-1, length))
    for number, (begin, end) in enumerate(pairwise([0, *ends])):
        rows = slice(number * packs, (number + 1) * packs)
        yield Batch(
            torch.from_numpy(ids[rows]), torch.from_numpy(positions[rows]), torch.from_numpy(select[rows]),
            torch.from_numpy(labels[begin:end]), _weights(weights[begin:end]),
        )  # fmt: skip


def _weights(mask: NDArray[np.integer]) -> Tensor | None:
    return torch.from_numpy(mask.astype(np.float32) / WHOLE) if (mask != WHOLE).any() else None
