"""The training loop: one page, read from top to bottom.

What all ranks have to know before the optimizer's step they agree on while they compute (`agreement`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import distributed

from refit import domains
from refit.errors import Diverged, Preempted
from refit.spec import Skip
from trainer import checkpoints, device, metrics, scene
from trainer.agreement import Agreement, anybody
from trainer.batches import Batch, Loader, Step
from trainer.contents import Contents
from trainer.engines import Engine
from trainer.parts import Parts
from trainer.randomness import Numbers
from trainer.saver import Saver
from trainer.schedule import learning_rate
from trainer.skips import Skips
from trainer.task import Task, Wire
from trainer.usage import Usage
from trainer.validation import GivenUp, Validator

LONG_SECONDS = 1.0
"""After steps of more than so long ranks ask once more whether to stop: the next one may be longer than there is."""

PACKS_TOLD = 256
"""So many of a step's packs are named when their batch is odd."""


class Loop:
    """Optimizer steps, from wherever the engine stands."""

    def __init__(
        self, engine: Engine, loader: Loader, task: Task, wire: Wire, stopping: Callable[[], float] = lambda: 0.0,
        validator: Validator | None = None,
    ) -> None:  # fmt: skip
        self._engine, self._loader, self._task, self._wire = engine, loader, task, wire
        self._stopping, self._validator = stopping, validator
        self._rank = distributed.get_rank()
        if self._rank == 0:
            self._contents = Contents(loader, domains.read(task.dataset, "train"))
        # Ranks of a tensor-parallel group have the same loss; one of them says it.
        self._counts = self._rank % task.train.tensor_parallel == 0
        best = validator.best.step if validator and validator.best else None
        self._saver = Saver(engine, task, wire, best, stopping, validator.forget if validator else None)
        self._parts = Parts()
        self._clock = self._parts.clock
        self._usage = Usage(task, engine.sizes)
        self._seconds = 0.0
        self._unlooked = validator is not None and task.checkpoint is not None and checkpoints.unlooked(task.checkpoint)
        """The look after the last step was cut short by a stop."""
        self.numbers = Numbers.now()
        """This rank's random numbers before the last step."""
        # What is tried out may not be passed over.
        budget = task.train.skip if task.mode in ("train", "replay") else Skip()
        self._skips = Skips(budget, checkpoints.skipped(task.checkpoint) if task.checkpoint else ())

    def run(self, step: int, until: int) -> dict[str, Any]:
        """Take the steps from `step` (finished ones) to `until`, saving as the spec says; returns the last record.

        Raises:
            Diverged: a loss or a gradient is not finite, and it may not be skipped; its scene is in scene.json.
            Preempted: the launcher was told to stop; everything up to here is in a checkpoint.
        """
        record: dict[str, Any] = {}
        if step > 0 and self._unlooked:
            self._look_again(step, until)
        with self._appending() as append:
            while step < until and not (self._validator and self._validator.is_enough):
                record = self.step(step)
                step += 1
                is_best = self._look(step, until, record)
                append(record)
                self._wire.send("step", **record)
                enough = self._validator is not None and self._validator.is_enough
                if step == until or enough:
                    self._saver.save(step, self._of_checkpoint)
                elif self._stop:
                    self._saver.last(step, self._of_checkpoint, self._stopping())
                    raise Preempted(self._farewell(step))
                else:
                    self._saver.after(step, self._of_checkpoint, must=is_best)
        return record

    def _look_again(self, step: int, until: int) -> None:
        """Look where a stop cut the look after this step short, so that what it decides is decided as without it."""
        record = metrics.last(self._task.folder, 1)[0] if self._rank == 0 else {}
        self._look(step, until, record)
        if self._rank == 0 and not self._unlooked:
            metrics.amend(self._task.folder, record)
        if self._unlooked:
            raise Preempted(self._farewell(step))

    def _appending(self) -> AbstractContextManager[Callable[[dict[str, Any]], None]]:
        return metrics.appending(self._task.folder) if self._rank == 0 else nullcontext(lambda record: None)

    def step(self, number: int) -> dict[str, Any]:
        """One optimizer step: forward, backward, agreement, update. Returns its record."""
        began, self.numbers = time.perf_counter(), Numbers.now()
        with self._clock("data"):
            step = self._loader.step(number)
            holds = self._look_into(number, step)
        losses = torch.zeros((), dtype=torch.float64, device=device.here())
        for index, batch in enumerate(self._batches(step), start=1):
            last = index == len(step.batches)
            with self._clock("forward"):
                loss = self._engine.loss(batch)
                losses += loss.detach()
                if last:  # looked at once: the host waits for the device then
                    agreement = self._agree(number, float(losses))
            self._wire.beat()  # who waits for another on the way back has come further than that one
            with self._clock("backward"):
                self._engine.backward(loss, step.weight, last=last)
            self._wire.beat()
        with self._clock("wait"):
            agreed = agreement.heard()
            # A stop may have come on the way back: where steps are long that is asked too, which costs them nothing.
            self._stop = agreed.stop or (agreed.seconds > LONG_SECONDS and anybody(self._stopping() > 0))
        self._saver.heard(agreed.saving)
        rate, norm = learning_rate(self._task.train, number), math.nan
        why = None if agreed.finite else "the loss is not finite"
        if why is None:
            try:
                with self._clock("optimizer"):
                    norm = self._engine.update(rate)
            except Diverged as error:
                why = str(error)
        record = {
            "step": number + 1, "loss": _finite(agreed.nll / step.weight), "grad_norm": _finite(norm), "lr": rate,
            **{name: _finite(total / step.weight) for name, total in agreed.told.items()},
            "tokens": step.tokens, "targets": step.targets, **holds,
            **({} if why is None else self._pass_over(number, step, agreed.nll, why)),
            **self._timed(began), **self._saver.told(),
        }  # fmt: skip
        self._seconds = record["seconds"]
        record |= self._usage.of(step.tokens, self._seconds)
        return record

    def _timed(self, began: float) -> dict[str, float]:
        """Seconds of the step and of its parts; its work is done then, on a card too."""
        spent = self._parts.take()
        return {"seconds": time.perf_counter() - began, **spent}

    def _batches(self, step: Step) -> Iterator[Batch]:
        """This rank's micro batches, where they are computed with."""
        for batch in step.batches:
            with self._clock("data"):
                here = device.put(batch)
            yield here

    def _look_into(self, number: int, step: Step) -> dict[str, Any]:
        """What the step's packs hold, for rank 0's record; the launcher is told before anything is learnt from them."""
        if self._rank > 0:
            return {}
        holds = self._contents.of(number, step)
        self._wire.send(
            "batch", step=number + 1, tokens=step.tokens, targets=step.targets, rank_tokens=step.rank_tokens,
            rank_targets=step.rank_targets, packs=step.packs[:PACKS_TOLD].tolist(), **holds,
        )  # fmt: skip
        return holds

    def _pass_over(self, number: int, step: Step, nll: float, why: str) -> dict[str, Any]:
        """Skip a step that is not finite, keeping its scene; what its record says of that.

        Raises:
            Diverged: the budget does not allow it.
        """
        if not self._skips.spend(number + 1):
            raise self._diverged(number, step, nll, why)
        facts, random = self._facts(number, step, nll, why)
        if self._rank == 0:
            scene.keep_skipped(self._task.folder, facts, step.packs.tolist(), self._loader.split, random)
        with self._clock("optimizer"):
            self._engine.skip()
        return {"skipped": True, "why": why, "skips": len(self._skips.steps)}

    def _look(self, step: int, until: int, record: dict[str, Any]) -> bool:
        """Put the loss on the validation split into the record, where it is time to look; whether it is the lowest."""
        if self._validator is None or not self._validator.is_due(step, until):
            return False
        if step == until:  # what becomes of an earlier best is known before the last one is found
            self._saver.finish()
        self._wire.beat()
        try:
            with self._clock("validation"):
                look = self._validator.look(step, to_the_end=step == until)  # the last one says what is published
        except GivenUp:
            self._stop = self._unlooked = True
            return False
        except Diverged:
            self._saver.finish(strict=False)
            raise
        self._unlooked = False
        record["validation_loss"] = look.loss
        if look.domains:
            record["validation_losses"] = look.domains
        record |= {**look.measures, **self._parts.take()}
        return self._validator.best is not None and self._validator.best.step == step

    def save(self, step: int) -> None:
        """Write a checkpoint, unless this very step is in one, and wait for it."""
        self._saver.save(step, self._of_checkpoint)

    def _of_checkpoint(self) -> dict[str, Any]:
        """What a checkpoint's manifest tells beside what every one does."""
        best = self._validator.best if self._validator else None
        facts: dict[str, Any] = {"dtype": self._task.dtype, "best": best.as_dict() if best else None}
        facts |= {"unlooked": True} if self._unlooked else {}
        return facts | ({"skipped": list(self._skips.steps)} if self._skips.steps else {})

    def _farewell(self, step: int) -> str:
        saved = self._saver.saved_at
        if saved == step:
            return f"told to stop; step {step} is in a checkpoint"
        return (
            f"told to stop after step {step}; there was no time left to save it, and the last checkpoint is of step "
            f"{saved}. Raise train.checkpoint.grace_seconds"
        )

    def _agree(self, number: int, nll: float) -> Agreement:
        return Agreement(
            number, nll, counts=self._counts, stop=self._stopping() > 0, seconds=self._seconds,
            saving=self._saver.votes(), told=self._engine.told(),
        )  # fmt: skip

    def _facts(self, number: int, step: Step, nll: float, why: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """What a scene tells, and where each rank's random numbers stood; all ranks together."""
        random: list[dict[str, Any]] = [{}] * self._task.ranks
        distributed.all_gather_object(random, self.numbers.document())
        return {
            "step": number + 1, "why": why, "loss": str(nll / step.weight), "checkpoint": self._saver.saved_at,
            "learning_rate": learning_rate(self._task.train, number),
            "gradient_norms": scene.by_layer(self._engine.gradient_norms()),
        }, random  # fmt: skip

    def _diverged(self, number: int, step: Step, nll: float, why: str) -> Diverged:
        self._saver.finish(strict=False)  # what is being saved is of a step before, and good
        facts, random = self._facts(number, step, nll, why)
        if self._rank == 0:
            scene.keep(self._task.folder, facts, step.packs.tolist(), self._loader.split, random)
        return Diverged(
            f"step {number + 1}: {why}. The scene is in {scene.SCENE}; the last checkpoint is of step "
            f"{self._saver.saved_at}. `trainer replay` takes the step again and says where it begins; or lower "
            f"train.learning_rate.{self._skips.told}"
        )


def _finite(value: float) -> float | None:
    """A number for a record: JSON has no NaN."""
    return value if math.isfinite(value) else None
