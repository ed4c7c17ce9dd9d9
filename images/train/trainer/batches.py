"""From packs on the disk to the tensors of a step; which packs is `order`'s business."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from refit.packed import WHOLE, Packed, position_ids
from refit.spec import Train
from trainer.order import packs_of_step


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
    """What one optimizer step learns from; all but `micro`, one rank's share, is of all ranks.

    `weight` is what the targets (of preference pairs: the pairs) weigh together, by which their loss is divided; 1
    where there are none.
    """

    packs: NDArray[np.int64]
    tokens: int
    targets: int
    weight: float
    micro: tuple[NDArray[np.int64], ...]


class Loader:
    """The packs of a training, dealt out to the ranks.

    The micro batches of a step are the same on any number of ranks; rank r takes each `ranks`-th of them. So one rank
    and two see the same samples in the same step, and know what its targets weigh without asking each other.
    """

    def __init__(self, split: Packed, train: Train, *, rank: int, ranks: int) -> None:
        self.split, self._train, self._rank, self._ranks = split, train, rank, ranks
        if train.accumulation % ranks:
            raise ValueError(f"{train.accumulation} micro batches cannot be dealt out to {ranks} ranks")

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

    def packs_of(self, number: int) -> NDArray[np.int64]:
        """The packs of step `number` (from 0), of all ranks, in order."""
        per_step = self._train.micro_batch * self._train.accumulation
        return packs_of_step(number, per_step=per_step, packs=self.split.header.packs, seed=self._train.seed)

    def by_rank(self, packs: NDArray[np.int64]) -> tuple[list[int], list[int]]:
        """Tokens and targets that each rank is given of a step's packs."""
        tokens = np.count_nonzero(self.split.segments[packs], axis=1)
        targets = np.count_nonzero(self.split.mask[packs][:, 1:], axis=1)
        dealt = np.stack([tokens, targets]).reshape(2, -1, self._ranks, self._train.micro_batch).sum(axis=(1, 3))
        return dealt[0].tolist(), dealt[1].tolist()

    def step(self, number: int) -> Step:
        """Step `number` (from 0)."""
        train, packs = self._train, self.packs_of(number)
        micro = packs.reshape(train.accumulation, train.micro_batch)
        mask = self.split.mask[packs][:, 1:]
        return Step(
            packs=packs,
            tokens=int((self.split.segments[packs] > 0).sum()),
            targets=int(np.count_nonzero(mask)),
            weight=int(mask.sum(dtype=np.int64)) / WHOLE or 1.0,
            micro=tuple(micro[self._rank :: self._ranks]),
        )

    def batches(self, step: Step) -> Iterator[Batch]:
        """This rank's micro batches of a step."""
        for packs in step.micro:
            yield self.batch(packs)

    def batch(self, packs: NDArray[np.int64]) -> Batch:
        """A batch of the given packs."""
        return to_batch(self.split.tokens[packs], self.split.segments[packs], self.split.mask[packs])


def to_batch(tokens: NDArray[np.integer], segments: NDArray[np.integer], mask: NDArray[np.integer]) -> Batch:
    """A batch from arrays of shape (packs, length) as `refit.packed` stores them."""
    ids = torch.from_numpy(tokens.astype(np.int64))
    target = torch.from_numpy(mask > 0)
    select = torch.zeros_like(target)
    select[:, :-1] = target[:, 1:]
    return Batch(
        ids, torch.from_numpy(position_ids(segments)), select, ids[:, 1:][target[:, 1:]], _weights(mask[:, 1:])
    )


def _weights(mask: NDArray[np.integer]) -> Tensor | None:
    weights = mask[mask > 0]
    return torch.from_numpy(weights.astype(np.float32) / WHOLE) if (weights != WHOLE).any() else None
