"""DeepSpeed, behind the five things that the loop asks of it.

What differs between ZeRO stages is settled here: who clips, who sees a bad gradient before the optimizer does, how
whole weights are put together again.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor, distributed, nn

from refit.errors import Diverged
from refit.spec import Train
from trainer import fragments
from trainer.objective import Objective
from trainer.probe import Probe
from trainer.state import Reader, State

TIMEOUT = timedelta(hours=12)  # the launcher watches the ranks, and knows better what takes long


def connect(rendezvous: Path, rank: int, ranks: int) -> None:
    """Join the other ranks; they meet in a file, so there is no port that could be taken."""
    # Its all-reduce over shared memory is compiled at first use: two minutes, and a compiler, for nothing.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks, timeout=TIMEOUT
    )


class Engine:
    """An objective in training."""

    def __init__(self, objective: Objective, train: Train) -> None:
        self._train = train
        self._rank, self._ranks = distributed.get_rank(), distributed.get_world_size()
        self._cleared = False
        optimizer = torch.optim.AdamW(
            _groups(objective, train.weight_decay), lr=train.learning_rate, betas=(train.beta1, train.beta2), fused=True
        )
        self._engine, self._optimizer, _, _ = deepspeed.initialize(
            model=objective, optimizer=optimizer, config=self._config(), dist_init_required=False
        )

    def _config(self) -> dict[str, Any]:
        train = self._train
        own = train.accumulation // self._ranks
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": train.micro_batch,
            "gradient_accumulation_steps": own,
            "train_batch_size": train.micro_batch * train.accumulation,
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 1 << 30,
            "zero_optimization": {"stage": train.zero_stage, "overlap_comm": False},
        }
        if train.zero_stage > 0:
            config["gradient_clipping"] = train.clip  # at stage 0 we clip, and see the norm, ourselves
        return config

    def loss(self, batch: Any) -> Tensor:
        """The objective's loss of a batch (summed, not averaged)."""
        loss: Tensor = self._engine(batch)
        return loss

    def backward(self, loss: Tensor, weight: float, *, last: bool) -> None:
        """Add the gradient of `loss / weight`, where `weight` is that of the whole step's targets on all ranks.

        DeepSpeed averages over ranks; a sum is what a mean over all targets needs. `last` says that the step's
        gradient is complete with this: after the others it counts on, and only reduces at the end.
        """
        self._engine.backward(loss * (self._ranks / weight), scale_wrt_gas=False)
        if not last:
            self._engine.step()

    def update(self, learning_rate: float) -> float:
        """Clip and take the optimizer step; returns the gradient's norm before clipping.

        Raises:
            Diverged: the gradient is not finite. The weights are as they were.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        if self._train.zero_stage == 0:
            # In two halves: clipping by what is not finite would make every gradient so, and hide where it began.
            trained = self._trained()
            total = nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
            norm = float(total)
            if math.isfinite(norm):
                nn.utils.clip_grads_with_norm_(trained, self._train.clip, total)
                self._engine.step()
        else:
            self._engine.step()  # skips the optimizer by itself when the gradient is not finite
            skipped = getattr(self._engine.optimizer, "overflow", False)
            norm = math.nan if skipped else float(self._engine.get_global_grad_norm())
            self._cleared = bool(skipped)
        if not math.isfinite(norm):
            raise Diverged("the gradient is not finite; the optimizer step was not taken")
        return norm

    def gradient_norms(self) -> list[tuple[str, float]]:
        """Name and norm of each trained parameter's gradient before the update; all ranks together.

        None above ZeRO 0 once an update was skipped: DeepSpeed has thrown them away.
        """
        from deepspeed.utils import safe_get_full_grad

        found: list[tuple[str, float]] = []
        if self._cleared:
            return found
        for name, parameter in self._engine.module.named_parameters():
            if parameter.requires_grad:
                whole = parameter.grad if self._train.zero_stage == 0 else safe_get_full_grad(parameter)
                found.append((name, float(whole.float().norm()) if whole is not None else 0.0))
        return found

    def probing(self, probe: Probe) -> AbstractContextManager[None]:
        """Have a probe look at what every module answers."""
        return probe.listening(self._engine.module)

    def logits(self, batch: Any) -> Tensor:
        """What the model answers at a batch's targets, without dropout and without a gradient; all ranks together."""
        self._engine.eval()
        try:
            with torch.no_grad():
                logits: Tensor = self._engine(batch, True)
        finally:
            self._engine.train()
        return logits

    def told(self) -> dict[str, float]:
        """What the objective tells of its batches since it was last asked: sums by weight, of this rank."""
        told: dict[str, float] = self._engine.module.told()
        return told

    def judged(self, batch: Any) -> Tensor:
        """Loss and measures of each pair of a batch, without dropout and without a gradient; all ranks together."""
        self._engine.eval()
        try:
            with torch.no_grad():
                self._engine(batch)
        finally:
            self._engine.train()
        judged: Tensor = self._engine.module.judged()
        return judged

    def state(self) -> State:
        """A copy of this rank's part of the weights and the optimizer's state."""
        stage = self._train.zero_stage
        pieces = fragments.of(self._engine, stage, self._rank)
        return State.of(pieces, fragments.steps_of(self._engine, stage))

    def load(self, folder: Path) -> None:
        """Go on from the state in a folder, whatever ranks wrote it; of an engine that has taken no step.

        Raises:
            BadInput: it is not all there.
        """
        stage = self._train.zero_stage
        with torch.no_grad(), Reader(folder) as reader:
            fragments.prepare(self._engine, stage, reader.steps)
            pieces = list(fragments.of(self._engine, stage, self._rank))
            if stage == 0 and self._rank > 0:  # every rank has all of it, and one writes it
                pieces = list(fragments.of(self._engine, stage, 0))
            reader.fill(pieces)
            fragments.settle(
                self._engine, stage, pieces, lambda name, size: reader.read(name, fragments.WEIGHT, 0, size)
            )

    @contextmanager
    def whole(self) -> Iterator[Objective]:
        """The objective with all its weights in one piece; all ranks together, none may change them."""
        objective: Objective = self._engine.module
        if self._train.zero_stage < 3:
            yield objective
            return
        with deepspeed.zero.GatheredParameters(list(objective.parameters()), modifier_rank=None):
            yield objective

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._engine.module.parameters() if parameter.requires_grad]


def _groups(objective: Objective, weight_decay: float) -> list[dict[str, Any]]:
    trained = [parameter for parameter in objective.parameters() if parameter.requires_grad]
    if weight_decay == 0:
        return [{"params": trained, "weight_decay": 0.0}]
    # Norms and biases are scales and offsets; pulling them to 0 is not regularisation.
    matrices = [parameter for parameter in trained if parameter.ndim > 1]
    rest = [parameter for parameter in trained if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
