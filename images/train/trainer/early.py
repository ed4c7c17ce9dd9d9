"""Is a checkpoint worse than the model that its training began with? Asked while the training goes on.

Documents of the validation split are the items, each with its mean loss, and both models answer the same ones; so the
interval of the difference is a paired one. It is light on purpose: no export, no server, no generation.

What it does not do: say that a checkpoint is good. The exam and the gate do, at the end.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed
from torch.nn import functional

from refit.packed import Packed
from refit.spec import Early
from refit.statistics import paired_difference
from trainer import device
from trainer.batches import to_batch
from trainer.engines import Engine
from trainer.inputs import validation_split
from trainer.task import Task, Wire

LEAST = 20
"""Fewer documents say nothing for certain."""


def losses(engine: Engine, task: Task, wire: Wire) -> NDArray[np.float64]:
    """The mean loss of each of the first documents that have a target, shape (documents,); all ranks together."""
    split = validation_split(task.dataset, task.train)
    packs = _packs(split, task.train.early.items)
    found: list[NDArray[np.float64]] = []
    for at in range(0, len(packs), task.train.micro_batch):
        some = packs[at : at + task.train.micro_batch]
        found.append(_by_document(engine, split, some))
        wire.beat()
    told = torch.from_numpy(np.concatenate(found))
    distributed.all_reduce(told)  # every rank has all of them; the mean is the same number on each
    means: NDArray[np.float64] = (told / distributed.get_world_size()).numpy()
    return means[: task.train.early.items]


def compare(checkpoint: NDArray[np.float64], base: NDArray[np.float64], settings: Early) -> dict[str, object]:
    """Whether the checkpoint is worse for certain: `verdict` is worse, fine, or (of few documents) unknown."""
    difference = paired_difference(checkpoint, base, settings.confidence)
    worse = "worse" if difference.low > settings.margin else "fine"
    verdict = worse if len(base) >= LEAST and difference.known else "unknown"
    return {
        "verdict": verdict, "documents": len(base), "loss": float(checkpoint.mean()), "base_loss": float(base.mean()),
        "difference": difference.value, "low": difference.low, "high": difference.high, "margin": settings.margin,
    }  # fmt: skip


def _packs(split: Packed, documents: int) -> NDArray[np.int64]:
    """The first packs that together hold so many documents with a target; all where there are fewer."""
    packs, count = 0, 0
    while packs < split.header.packs and count < documents:
        count += len(np.unique(split.segments[packs][1:][split.mask[packs][1:] > 0]))
        packs += 1
    return np.arange(packs)


def _by_document(engine: Engine, split: Packed, packs: NDArray[np.int64]) -> NDArray[np.float64]:
    segments, mask = split.segments[packs], split.mask[packs]
    batch = device.put(to_batch(split.tokens[packs], segments, mask))
    nll = functional.cross_entropy(engine.logits(batch), batch.labels, reduction="none").double().cpu().numpy()
    rows = np.broadcast_to(np.arange(len(packs))[:, None], segments.shape)
    place = (rows * (int(segments.max()) + 1) + segments)[:, 1:][mask[:, 1:] > 0]
    sums, counts = np.bincount(place, weights=nll), np.bincount(place)
    means: NDArray[np.float64] = sums[counts > 0] / counts[counts > 0]
    return means
