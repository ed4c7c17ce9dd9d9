"""The training loop: one page, read from top to bottom.

Before every optimizer step the ranks agree on four numbers: the loss, whether anything is not finite, whether to stop,
whether to save. So they stop, save and give up at the same step, and a NaN on any of them moves nobody's weights. What
an objective tells beside its loss is added up with them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed

from refit.errors import Diverged, Preempted
from trainer import metrics, scene, snapshot
from trainer.batches import Loader, Step
from trainer.engine import Engine
from trainer.schedule import learning_rate
from trainer.task import Task, Wire
from trainer.validation import Validator


class Loop:
    """Optimizer steps, from wherever the engine stands."""

    def __init__(
        self, engine: Engine, loader: Loader, task: Task, wire: Wire, stopping: Callable[[], bool] = lambda: False,
        validator: Validator | None = None,
    ) -> None:  # fmt: skip
        self._engine, self._loader, self._task, self._wire = engine, loader, task, wire
        self._stopping, self._validator = stopping, validator
        self._rank = distributed.get_rank()
        self._saved_at: int | None = task.step if task.checkpoint else None
        self._saved_when = time.monotonic()
        self._spent: dict[str, float] = {}

    def run(self, step: int, until: int) -> dict[str, Any]:
        """Take the steps from `step` (finished ones) to `until`, saving as the spec says; returns the last record.

        Raises:
            Diverged: a loss or a gradient is not finite; its scene is in scene.json.
            Preempted: the launcher was told to stop; everything up to here is in a checkpoint.
        """
        record: dict[str, Any] = {}
        while step < until and not (self._validator and self._validator.is_enough):
            record = self.step(step)
            step += 1
            is_best = self._look(step, until, record)
            if self._rank == 0:
                metrics.append(self._task.folder, record)
            self._wire.send("step", **record)
            enough = self._validator is not None and self._validator.is_enough
            if self._stop or self._due or step == until or self._planned(step) or is_best or enough:
                self.save(step)
            if self._stop and step < until and not enough:
                raise Preempted(f"told to stop; step {step} is in a checkpoint")
        return record

    def step(self, number: int) -> dict[str, Any]:
        """One optimizer step: forward, backward, agreement, update. Returns its record."""
        began = time.perf_counter()
        with self._clock("data"):
            step = self._loader.step(number)
        nll = 0.0
        for index, batch in enumerate(self._loader.batches(step), start=1):
            with self._clock("forward"):
                loss = self._engine.loss(batch)
            with self._clock("backward"):
                self._engine.backward(loss, step.weight, last=index == len(step.micro))
            nll += float(loss.detach())
            self._wire.send("beat")
        with self._clock("wait"):
            nll, bad, told = self._agree(nll, self._engine.told())
        if bad:
            raise self._diverged(number, step, nll, "the loss is not finite")
        rate = learning_rate(self._task.train, number)
        try:
            with self._clock("optimizer"):
                norm = self._engine.update(rate)
        except Diverged as error:
            raise self._diverged(number, step, nll, str(error)) from error
        record = {
            "step": number + 1, "loss": nll / step.weight, "grad_norm": norm, "lr": rate,
            **{name: total / step.weight for name, total in told.items()},
            "tokens": step.tokens, "targets": step.targets, "seconds": time.perf_counter() - began, **self._spent,
        }  # fmt: skip
        self._spent = {}
        return record

    def _look(self, step: int, until: int, record: dict[str, Any]) -> bool:
        """Put the loss on the validation split into the record, where it is time to look; whether it is the lowest."""
        if self._validator is None or not self._validator.is_due(step, until):
            return False
        self._wire.send("beat")
        with self._clock("validation"):
            look = self._validator.look(step)
        record["validation_loss"] = look.loss
        if look.domains:
            record["validation_losses"] = look.domains
        record |= {**look.measures, **self._spent}
        self._spent = {}
        return self._validator.best is not None and self._validator.best.step == step

    def save(self, step: int) -> None:
        """Write a checkpoint, unless this very step is in one."""
        if step == self._saved_at:
            return
        self._wire.send("beat")
        with self._clock("save"):
            best = self._validator.best if self._validator else None
            facts = {"dtype": self._task.dtype, "best": best.as_dict() if best else None}
            snapshot.save(self._engine, self._task, step, facts, best.step if best else None)
        self._saved_at, self._saved_when = step, time.monotonic()
        self._wire.send("saved", step=step)

    def _planned(self, step: int) -> bool:
        every = self._task.train.checkpoint.every_steps
        return every is not None and step % every == 0

    def _agree(self, nll: float, told: dict[str, float]) -> tuple[float, bool, dict[str, float]]:
        overdue = time.monotonic() - self._saved_when >= 60 * self._task.train.checkpoint.every_minutes
        votes = torch.tensor(
            [nll, not math.isfinite(nll), self._stopping(), overdue and self._rank == 0, *told.values()],
            dtype=torch.float64,
        )
        distributed.all_reduce(votes)
        self._stop, self._due = bool(votes[2] > 0), bool(votes[3] > 0)
        return float(votes[0]), bool(votes[1] > 0), dict(zip(told, votes[4:].tolist(), strict=True))

    def _diverged(self, number: int, step: Step, nll: float, why: str) -> Diverged:
        facts = {
            "step": number + 1, "why": why, "loss": str(nll / step.weight), "checkpoint": self._saved_at,
            "learning_rate": learning_rate(self._task.train, number),
            "gradient_norms": scene.by_layer(self._engine.gradient_norms()),
        }  # fmt: skip
        if self._rank == 0:
            scene.keep(self._task.folder, facts, step.packs.tolist(), self._loader.split)
        return Diverged(
            f"step {number + 1}: {why}. The scene is in {scene.SCENE}; the last checkpoint is of step "
            f"{self._saved_at}. `trainer replay` takes the step again and says where it begins; or lower "
            "train.learning_rate."
        )

    @contextmanager
    def _clock(self, name: str) -> Any:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._spent[name] = self._spent.get(name, 0.0) + time.perf_counter() - began
