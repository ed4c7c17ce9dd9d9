"""DeepSpeed, behind the five things that the loop asks of it.

What differs between ZeRO stages is settled here: who clips, who sees a bad gradient before the optimizer does, how
whole weights are put together again.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor, distributed, nn

from refit.errors import Diverged
from refit.spec import Train
from trainer import device, fragments, tensor_parallel
from trainer.fragments import Fragment, Window
from trainer.memory import BUCKET
from trainer.objective import Objective
from trainer.optimizer import adamw, clip, trained
from trainer.probe import Probe
from trainer.state import Reader, State

# Not pinned: torch rounds pinned memory up to powers of two, and what a plan counts is what there is.
_HOST = {"device": "cpu", "pin_memory": False}
_OFFLOAD: dict[str, dict[str, Any]] = {
    "none": {}, "optimizer": {"offload_optimizer": _HOST}, "all": {"offload_optimizer": _HOST, "offload_param": _HOST},
}  # fmt: skip

TIMEOUT = timedelta(hours=12)  # the launcher watches the ranks, and knows better what takes long


def connect(rendezvous: Path, rank: int, ranks: int) -> None:
    """Join the other ranks; they meet in a file, so there is no port that could be taken."""
    if not device.on_card():
        # Its all-reduce over shared memory is compiled at first use: two minutes, and a compiler, for nothing. On cards
        # it has none, and this look at what can be compiled would be for nothing.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    distributed.init_process_group(
        device.backend(), init_method=f"file://{rendezvous}", rank=rank, world_size=ranks, timeout=TIMEOUT
    )


class Engine:
    """An objective in training. `_rank` and `_ranks` count groups of tensor-parallel ranks: they see the same packs."""

    def __init__(self, objective: Objective, train: Train) -> None:
        self._train = train
        self._tensor = train.tensor_parallel
        self._rank, self._ranks = tensor_parallel.share(
            distributed.get_rank(), distributed.get_world_size(), self._tensor
        )
        self._thrown_away: list[tuple[str, float]] | None = None
        """Norms of the gradients that DeepSpeed has thrown away with a step that was not finite, till it is skipped."""
        if self._tensor > 1:
            tensor_parallel.check(objective.model.config, self._tensor)
            objective.config = objective.model.config  # DeepSpeed finds the plan of what is cut there
        self._engine, self._optimizer, _, _ = deepspeed.initialize(
            model=objective,
            optimizer=adamw(objective, train),
            config=self._config(trained(objective)),
            dist_init_required=False,
        )
        self._cut: dict[str, Window] = {}
        if self._tensor > 1:
            self._engine.first_dataloader_check.remove()  # the loader gives a group the same packs; it cannot read ours
            self._cut = tensor_parallel.windows(self._engine.module)
        if train.zero_stage > 0:
            self._look_before_overflow()

    def _config(self, learning: list[nn.Parameter]) -> dict[str, Any]:
        train = self._train
        own = train.accumulation // self._ranks
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": train.micro_batch,
            "gradient_accumulation_steps": own,
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 1 << 30,
            "timers": {"throughput": {"enabled": False}},  # it waits for a card at each micro batch, for its log
            "zero_optimization": {
                "stage": train.zero_stage,
                "overlap_comm": False,
                # It makes room for as many at once, 2 GB by itself; more than there are never come.
                "reduce_bucket_size": max(1, min(BUCKET, sum(parameter.numel() for parameter in learning))),
                **_OFFLOAD[train.offload],
            },
            # Torch's Adam does on the host too; DeepSpeed's own is compiled at first use, and would round otherwise.
            "zero_force_ds_cpu_optimizer": False,
        }
        # At stage 0 we clip, and see the norm, ourselves. It says so, for left out it is 1: DeepSpeed would clip again.
        config["gradient_clipping"] = train.clip if train.zero_stage > 0 else 0.0
        if self._tensor > 1:
            config["tensor_parallel"] = {"autotp_size": self._tensor, "vocab_parallel_lm_head": False}
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
            norm = clip(trained(self._engine.module), self._train.clip)
            if math.isfinite(norm):
                self._engine.step()
        else:
            self._engine.step()  # skips the optimizer by itself when the gradient is not finite
            skipped = getattr(self._engine.optimizer, "overflow", False)
            norm = math.nan if skipped else float(self._engine.get_global_grad_norm())
        if not math.isfinite(norm):
            raise Diverged("the gradient is not finite; the optimizer step was not taken")
        return norm

    def skip(self) -> None:
        """Pass over a step after its last `backward`: nothing is learnt from it, and nothing is left of its gradients.

        Also after an `update` that raised Diverged.
        """
        stage = self._train.zero_stage
        if stage == 0:
            self._engine.zero_grad()
            self._engine.micro_steps += 1  # which tells where an accumulation ends
        elif self._thrown_away is None:
            # A loss may be infinite while its gradient is not. DeepSpeed throws a step away whole, whatever it has
            # accumulated where, when it is not finite: so it is made to.
            for pieces in self._engine.optimizer.averaged_gradients.values():
                for piece in pieces or ():
                    piece.fill_(math.nan)
            self._engine.step()
            if not self._engine.optimizer.overflow:
                raise AssertionError("DeepSpeed took a step that was to be skipped")
        self._thrown_away = None
        if fragments.is_fresh(self._engine, stage):
            fragments.prepare(self._engine, stage, 0)  # for a checkpoint before the first step that is taken

    def gradient_norms(self) -> list[tuple[str, float]]:
        """Name and norm of each trained parameter's gradient before the update; all ranks together."""
        from deepspeed.utils import safe_get_full_grad

        if self._thrown_away is not None:
            return self._thrown_away
        found: list[tuple[str, float]] = []
        for name, parameter in self._engine.module.named_parameters():
            if parameter.requires_grad:
                whole = parameter.grad if self._train.zero_stage == 0 else safe_get_full_grad(parameter)
                own = float(whole.float().norm()) if whole is not None else 0.0
                found.append((name, tensor_parallel.norm(own, cut=name in self._cut)))
        return found

    def _look_before_overflow(self) -> None:
        """Have the norms of a gradient that is not finite taken before DeepSpeed throws it away: on all ranks, for they
        agree on it, and just before they tell its loss scaler."""
        optimizer = self._engine.optimizer
        update_scale = optimizer._update_scale

        def look(has_overflow: bool = False) -> None:
            if has_overflow:
                self._thrown_away = self.gradient_norms()
            update_scale(has_overflow)

        optimizer._update_scale = look

    def sizes(self) -> tuple[int, int]:
        """Elements of all weights, and of those that are trained, whoever holds them."""
        counts = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in self._engine.module.parameters()]
        return sum(count for count, _ in counts), sum(count for count, trained in counts if trained)

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

    def state(self, kinds: Collection[str] = fragments.KINDS, buffers: dict[str, Tensor] | None = None) -> State:
        """A copy of this rank's part of the weights and the optimizer's state; see `State.of`."""
        stage = self._train.zero_stage
        # What is whole on every rank of a group, one of them writes.
        first = distributed.get_rank() % self._tensor == 0
        pieces = (one for one in self._pieces(self._rank) if first or one.name in self._cut)
        return State.of(pieces, fragments.steps_of(self._engine, stage), kinds=kinds, buffers=buffers)

    def load(self, folder: Path, *, weights_only: bool = False) -> None:
        """Go on from the state in a folder, whatever ranks wrote it; of an engine that has taken no step.

        With `weights_only` the optimizer is as before its first step: to look at the model, or to begin with it.

        Raises:
            BadInput: it is not all there.
        """
        stage = self._train.zero_stage
        with torch.no_grad(), Reader(folder) as reader:
            fragments.prepare(self._engine, stage, 0 if weights_only else reader.steps)
            # At stage 0 every rank has all of it, and one writes it.
            pieces = list(self._pieces(0 if stage == 0 else self._rank))
            reader.fill(pieces, (fragments.WEIGHT,) if weights_only else fragments.KINDS)
            fragments.settle(
                self._engine, stage, pieces,
                lambda name, size: reader.seen(name, fragments.WEIGHT, 0, size, self._cut.get(name)),
            )  # fmt: skip

    def _pieces(self, rank: int) -> Iterator[Fragment]:
        sizes = {name: parameter.numel() for name, parameter in self._engine.module.named_parameters()}
        for one in fragments.of(self._engine, self._train.zero_stage, rank):
            window = self._cut.get(one.name)
            yield one if window is None else one.seen(window, sizes[one.name])

    @contextmanager
    def whole(self) -> Iterator[Objective]:
        """The objective with all its weights in one piece; all ranks together, none may change them."""
        objective: Objective = self._engine.module
        if self._train.zero_stage < 3:
            with tensor_parallel.whole(objective, self._cut):
                yield objective
            return
        with deepspeed.zero.GatheredParameters(list(objective.parameters()), modifier_rank=None):
            yield objective

    def close(self) -> None:
        """Give back the memory that it holds, before another one is made; it can do nothing any more."""
        self._engine.destroy()
        if self._train.zero_stage == 3:
            fragments.release(self._engine)
        del self._engine, self._optimizer
        gc.collect()  # it refers to itself
