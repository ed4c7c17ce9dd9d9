"""A handful of packs learnt by heart: whether data, mask, weights and learning rate can work together at all.

One micro batch of packs that hold targets, the same for a seed, is learnt again and again at the recipe's learning
rate, without warm-up and dropout, until its loss is near 0. Every rank learns all of it, so that any ZeRO stage is
tried as it will be used. Nothing is kept but the curve.

What it does not do: say that the training will be good. It finds what no amount of data mends.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed

from refit.errors import Diverged, PreflightRefused
from refit.packed import WHOLE, Packed
from refit.spec import Train
from trainer import device
from trainer.batches import Loader
from trainer.engines import Engine
from trainer.order import packs_at
from trainer.task import Task, Wire

LOOKED_THROUGH = 1024
"""Among so many packs, in the order of training, there must be one with something to learn."""

WARM = 3
"""So many steps are timed before the minutes' worth of steps is known."""

SAME = 0.02
"""A loss that moved by less than this share of itself has not moved."""


def few(task: Task, ranks: int) -> Task:
    """The task with a recipe for a handful: one micro batch for each of the `ranks` that share them, no dropout."""
    train = task.train.model_copy(
        update={"accumulation": ranks, "lora": task.train.lora.model_copy(update={"dropout": 0.0})}
    )
    spec = task.job.spec.model_copy(update={"train": train})
    return task.model_copy(update={"job": task.job.model_copy(update={"spec": spec})})


def learn(engine: Engine, task: Task, loader: Loader, wire: Wire, allowed: int) -> dict[str, Any]:
    """Learn the handful in at most `allowed` steps; the curve, and whether its loss came near 0.

    `task` is the one that `few` made, `engine` is of it.

    Raises:
        PreflightRefused: it can not be learnt in the steps that the spec gives it, or there is nothing to learn.
    """
    settings, rate = task.train.overfit, task.train.learning_rate
    packs = handful(loader.split, task.train)
    batch = device.put(loader.batch(packs))
    weight = loader.ranks * int(loader.split.mask[packs][:, 1:].sum(dtype=np.int64)) / WHOLE
    losses: list[float] = []
    norms: list[float] = []
    seconds = 0.0
    while len(losses) < allowed:
        began = time.perf_counter()
        loss = engine.loss(batch)
        engine.backward(loss, weight, last=True)
        mean, usual = _agree(float(loss.detach()) * loader.ranks / weight, seconds)
        losses.append(mean)
        if mean <= settings.loss:
            break
        try:
            norms.append(engine.update(rate))
        except Diverged as error:
            raise PreflightRefused(f"{_told(losses)}\n{error}. Lower train.learning_rate.") from error
        seconds = time.perf_counter() - began
        wire.beat()
        if len(losses) == WARM:  # the ranks agree on what a step takes, and so on where they end
            allowed = min(allowed, max(WARM, int(60 * settings.minutes / max(usual, 1e-9))))
    learnt = losses[-1] <= settings.loss
    if not learnt and len(losses) >= settings.steps:
        raise PreflightRefused(f"{_told(losses)}\n{why(losses, norms, settings.loss)}")
    return {
        "learnt": learnt, "steps": len(losses), "losses": [round(loss, 6) for loss in losses],
        "wanted": settings.loss, "packs": packs.tolist(),
    }  # fmt: skip


def steps_allowed(train: Train) -> int:
    """Steps that the spec gives a handful, before its minutes are known: a step here is one micro batch of a rank's."""
    own = train.max_steps * (train.accumulation // (train.ranks // train.tensor_parallel))
    return min(train.overfit.steps, max(1, int(train.overfit.share * own)))


def handful(split: Packed, train: Train) -> NDArray[np.int64]:
    """The first packs of the training's order that hold a target: a micro batch, or as many as there are.

    Raises:
        PreflightRefused: none does.
    """
    places = np.arange(min(split.header.packs, LOOKED_THROUGH), dtype=np.int64)
    packs = packs_at(places, packs=split.header.packs, seed=train.seed)
    useful = packs[split.mask[packs][:, 1:].any(axis=1)]
    if not len(useful):
        raise PreflightRefused(
            f"none of the first {len(packs)} packs has a token to learn from: the mask is empty there. Look at what "
            "the data stage takes for the answer."
        )
    return useful[: train.micro_batch]


def why(losses: Sequence[float], norms: Sequence[float], wanted: float) -> str:
    """What a curve that did not come down says, in words; `norms` are the gradient's, before clipping."""
    first, last, lowest = losses[0], losses[-1], min(losses)
    if norms and max(norms) == 0:
        return "Every gradient was 0: nothing that is trained has a part in the answer. Are the right weights frozen?"
    if max(losses) - lowest <= SAME * first:
        return (
            "The loss did not move: train.learning_rate is too small by far, or what is trained has hardly a part in "
            "the answer (frozen weights, a LoRA of rank or alpha near 0)."
        )
    if last > first or lowest < 0.5 * last:
        return "The loss goes up or jumps: lower train.learning_rate."
    return (
        f"The loss comes down and stays above {wanted:g}: the same question has different answers in these packs "
        "(labels that contradict each other), a mask that asks for what cannot be known, or train.learning_rate is "
        "small; where the curve still falls, raise train.overfit.steps."
    )


def _told(losses: Sequence[float]) -> str:
    """The curve in a line: some twelve of its points."""
    every = max(1, math.ceil(len(losses) / 11))
    shown = [*losses[:-1:every], losses[-1]]
    return (
        f"a handful of packs was not learnt by heart in {len(losses)} step(s): loss "
        f"{' → '.join(f'{loss:.3g}' for loss in shown)}"
    )


def _agree(loss: float, seconds: float) -> tuple[float, float]:
    """The means of the ranks' losses, which rounding may keep apart, and seconds: all go on by the same numbers."""
    told = torch.tensor([loss, seconds], dtype=torch.float64)
    distributed.all_reduce(told)
    mean_loss, mean_seconds = (told / distributed.get_world_size()).tolist()
    return mean_loss, mean_seconds
