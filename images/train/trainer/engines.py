"""What the loop asks of whoever trains, and who that is: DeepSpeed, or one process with torch alone.

The engines are imported where they are chosen: DeepSpeed's import costs seconds, and a plain training needs none of it.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor

from refit.spec import Train
from trainer.fragments import KINDS
from trainer.objective import Objective
from trainer.probe import Probe
from trainer.state import State


class Engine(Protocol):
    """An objective in training."""

    def loss(self, batch: Any) -> Tensor:
        """The objective's loss of a batch (summed, not averaged)."""

    def backward(self, loss: Tensor, weight: float, *, last: bool) -> None:
        """Add the gradient of `loss / weight`, where `weight` is that of the whole step's targets on all ranks.

        `last` says that the step's gradient is complete with this.
        """

    def update(self, learning_rate: float) -> float:
        """Clip and take the optimizer step; returns the gradient's norm before clipping.

        Raises:
            Diverged: the gradient is not finite. The weights are as they were.
        """

    def skip(self) -> None:
        """Pass over a step after its last `backward`: nothing is learnt from it, and nothing is left of its gradients.

        Also after an `update` that raised Diverged.
        """

    def sizes(self) -> tuple[int, int]:
        """Elements of all weights, and of those that are trained, whoever holds them."""

    def gradient_norms(self) -> list[tuple[str, float]]:
        """Name and norm of each trained parameter's gradient before the update; all ranks together."""

    def probing(self, probe: Probe) -> AbstractContextManager[None]:
        """Have a probe look at what every module answers."""

    def logits(self, batch: Any) -> Tensor:
        """What the model answers at a batch's targets, without dropout and without a gradient; all ranks together."""

    def told(self) -> dict[str, float]:
        """What the objective tells of its batches since it was last asked: sums by weight, of this rank."""

    def judged(self, batch: Any) -> Tensor:
        """Loss and measures of each pair of a batch, without dropout and without a gradient; all ranks together."""

    def state(self, kinds: Collection[str] = KINDS, buffers: dict[str, Tensor] | None = None) -> State:
        """A copy of this rank's part of the weights and the optimizer's state; see `State.of`."""

    def load(self, folder: Path, *, weights_only: bool = False) -> None:
        """Go on from the state in a folder, whatever ranks wrote it; of an engine that has taken no step.

        With `weights_only` the optimizer is as before its first step: to look at the model, or to begin with it.

        Raises:
            BadInput: it is not all there.
        """

    def whole(self) -> AbstractContextManager[Objective]:
        """The objective with all its weights in one piece; all ranks together, none may change them."""

    def close(self) -> None:
        """Give back the memory that it holds, before another one is made; it can do nothing any more."""


def kind(train: Train, ranks: int) -> Literal["deepspeed", "plain"]:
    """Who trains a recipe on so many ranks: what it says, or by itself plain where DeepSpeed has nothing to do."""
    if train.engine == "auto":
        return "plain" if ranks == 1 and train.zero_stage == 0 and train.gpus_per_node == 0 else "deepspeed"
    return train.engine


def connect(train: Train, rendezvous: Path, rank: int, ranks: int) -> None:
    """Join the other ranks, if there are any."""
    if kind(train, ranks) == "plain":
        from trainer import plain

        plain.connect()
    else:
        from trainer import engine

        engine.connect(rendezvous, rank, ranks)


def start(objective: Objective, train: Train, ranks: int) -> Engine:
    """An engine that has taken no step."""
    if kind(train, ranks) == "plain":
        from trainer.plain import PlainEngine

        return PlainEngine(objective, train)
    from trainer.engine import Engine as DeepSpeedEngine

    return DeepSpeedEngine(objective, train)
