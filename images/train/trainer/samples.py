"""What a task learns from, by its objective: a loader of its packs, and what must be known before an engine is made."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from refit.packed import Packed
from refit.spec import Train
from refit.store import store_for
from trainer import device, reference
from trainer.batches import Loader
from trainer.inputs import train_split, validation_split
from trainer.objective import Objective, attention_for, build, load
from trainer.order import packs_of_step
from trainer.pairs import PairLoader, counts, to_pairs
from trainer.preference import log_probabilities
from trainer.reference import Reference
from trainer.state import Reader
from trainer.task import Task
from trainer.tensor_parallel import share

Index = NDArray[np.int64]
Beat = Callable[[], None]
Stopping = Callable[[], float]


def loader_of(task: Task, rank: int, beat: Beat, stopping: Stopping = lambda: 0.0) -> Loader:
    """The loader of a task; all ranks together, a training with DPO asks what it begins with first.

    Where that is a fresh adapter nothing is asked: the reference is the same model with its adapter off.

    Raises:
        Preempted: told to stop while it was asked.
    """
    train, split = task.train, train_split(task.dataset, task.train)
    own, shares = share(rank, task.ranks, train.tensor_parallel)
    if not train.of_pairs:
        return Loader(split, train, rank=own, ranks=shares)
    with_adapter = train.method != "full" and train.warm_start is None  # its reference is the adapter's absence
    if train.objective != "dpo" or with_adapter or task.mode == "export":
        return PairLoader(split, train, rank=own, ranks=shares)
    steps = {"train": train.max_steps, "smoke": train.smoke_steps}.get(task.mode, task.until + 1)
    known = _reference(task, split, "train", _packs_of(train, split, steps), beat, stopping)
    watched = None
    if task.mode in ("train", "smoke") and train.validation.every_steps:
        looked_at = validation_split(task.dataset, train)
        watched = _reference(task, looked_at, "validation", np.arange(looked_at.header.packs), beat, stopping)
    return PairLoader(split, train, rank=own, ranks=shares, reference=known, watched=watched)


def _packs_of(train: Train, split: Packed, steps: int) -> Index:
    """The packs that the first steps see, each once, rising."""
    packs, per_step = split.header.packs, train.micro_batch * train.accumulation
    if steps * per_step >= packs:  # an epoch sees all
        return np.arange(packs)
    return np.sort(packs_of_step(0, per_step=steps * per_step, packs=packs, seed=train.seed))


def _beginning(task: Task, length: int) -> Objective:
    """The model as the training begins with it, in what the training multiplies in, without dropout."""
    train, uri = task.train, task.train.warm_start
    if uri is None:  # and full: float32 weights
        attention = attention_for(length, card=device.on_card())
        base = load(task.base, dtype=torch.float32, attention=attention).eval()
        return Objective(base.to(device.here()), bfloat16=task.dtype == "bfloat16")
    objective = build(task.base, train, dtype=task.dtype, length=length)
    with torch.no_grad(), Reader(store_for(uri).local(uri)) as reader:
        for name, parameter in objective.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(reader.whole(name, parameter.numel()).view_as(parameter))
    return objective.to(device.here()).eval()


def _reference(task: Task, split: Packed, name: str, packs: Index, beat: Beat, stopping: Stopping) -> Reference:
    named = reference.name_of(task.fingerprint, split=name, dtype=task.dtype, packs=packs)

    def make() -> Reference:
        objective = _beginning(task, split.header.length)

        @torch.no_grad()
        def say(asked: Index) -> Tensor:
            beat()
            pairs = to_pairs(split.tokens[asked], split.segments[asked], split.mask[asked])
            return log_probabilities(objective, device.put(pairs)).cpu()

        at_once = task.train.micro_batch
        return reference.Asking(task.folder, named, split, packs, counts, at_once=at_once).all(say, stopping)

    found = reference.kept(task.folder, named, make)
    gc.collect()  # models refer to themselves here and there; the training's own comes now
    return found
