"""Training in one process, with torch alone: no DeepSpeed is imported, no rendezvous is waited for.

It takes the very steps that DeepSpeed takes at ZeRO 0 on one rank, to the bit, and its checkpoints are the same.
"""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from refit.errors import Diverged
from refit.spec import Train
from trainer import device, fragments
from trainer.objective import Objective
from trainer.optimizer import adamw, clip, trained
from trainer.probe import Probe
from trainer.state import Reader, State

STAGE = 0
"""How `fragments` sees it: everything is whole here."""


def connect() -> None:
    """A group of one, so that the loop can ask all ranks without asking whether there are any."""
    # Where DeepSpeed is installed accelerate imports it, for seconds, only to see that a model is none of its: so it is
    # not, for this process.
    sys.modules.setdefault("deepspeed", None)  # type: ignore[arg-type]
    store = distributed.HashStore()  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


class PlainEngine:
    """An objective in training by one process; `engines.Engine` says what each call is for."""

    def __init__(self, objective: Objective, train: Train) -> None:
        self.module, self.optimizer = objective.to(device.here()), adamw(objective, train)
        self._clip = train.clip

    def loss(self, batch: Any) -> Tensor:
        """The objective's loss of a batch (summed, not averaged)."""
        loss: Tensor = self.module(batch)
        return loss

    def backward(self, loss: Tensor, weight: float, *, last: bool) -> None:
        """Add the gradient of `loss / weight`."""
        (loss * (1 / weight)).backward()  # type: ignore[no-untyped-call]

    def update(self, learning_rate: float) -> float:
        """Clip and take the optimizer step; returns the gradient's norm before clipping.

        Raises:
            Diverged: the gradient is not finite. The weights are as they were.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        norm = clip(trained(self.module), self._clip)
        if not math.isfinite(norm):
            raise Diverged("the gradient is not finite; the optimizer step was not taken")
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def skip(self) -> None:
        """Pass over a step after its last `backward`: nothing is learnt from it."""
        self.optimizer.zero_grad()
        if fragments.is_fresh(self, STAGE):
            fragments.prepare(self, STAGE, 0)  # for a checkpoint before the first step that is taken

    def sizes(self) -> tuple[int, int]:
        """Elements of all weights, and of those that are trained."""
        counts = [(parameter.numel(), parameter.requires_grad) for parameter in self.module.parameters()]
        return sum(count for count, _ in counts), sum(count for count, learns in counts if learns)

    def gradient_norms(self) -> list[tuple[str, float]]:
        """Name and norm of each trained parameter's gradient before the update."""
        return [
            (name, float(parameter.grad.float().norm()) if parameter.grad is not None else 0.0)
            for name, parameter in self.module.named_parameters()
            if parameter.requires_grad
        ]

    def probing(self, probe: Probe) -> AbstractContextManager[None]:
        """Have a probe look at what every module answers."""
        return probe.listening(self.module)

    def logits(self, batch: Any) -> Tensor:
        """What the model answers at a batch's targets, without dropout and without a gradient."""
        self.module.eval()
        try:
            with torch.no_grad():
                logits: Tensor = self.module(batch, True)
        finally:
            self.module.train()
        return logits

    def told(self) -> dict[str, float]:
        """What the objective tells of its batches since it was last asked: sums by weight."""
        return self.module.told()

    def judged(self, batch: Any) -> Tensor:
        """Loss and measures of each pair of a batch, without dropout and without a gradient."""
        self.module.eval()
        try:
            with torch.no_grad():
                self.module(batch)
        finally:
            self.module.train()
        judged: Tensor = self.module.judged()  # type: ignore[operator]
        return judged

    def state(self, kinds: Collection[str] = fragments.KINDS, buffers: dict[str, Tensor] | None = None) -> State:
        """A copy of the weights and the optimizer's state; see `State.of`."""
        pieces = fragments.of(self, STAGE, 0)
        return State.of(pieces, fragments.steps_of(self, STAGE), kinds=kinds, buffers=buffers)

    def load(self, folder: Path, *, weights_only: bool = False) -> None:
        """Go on from the state in a folder, whatever engine and ranks wrote it; of an engine that has taken no step.

        With `weights_only` the optimizer is as before its first step: to look at the model, or to begin with it.

        Raises:
            BadInput: it is not all there.
        """
        with torch.no_grad(), Reader(folder) as reader:
            fragments.prepare(self, STAGE, 0 if weights_only else reader.steps)
            kinds = (fragments.WEIGHT,) if weights_only else fragments.KINDS
            reader.fill(list(fragments.of(self, STAGE, 0)), kinds)

    @contextmanager
    def whole(self) -> Iterator[Objective]:
        """The objective, which is whole anyway."""
        yield self.module

    def close(self) -> None:
        """Let go of the model and its optimizer; who forgets the engine has their memory back."""
        del self.module, self.optimizer
        gc.collect()  # models refer to themselves here and there
