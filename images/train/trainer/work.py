"""What all ranks do together: train and export, try a few steps and a restore, or export what a checkpoint holds."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import distributed

from refit import domains
from refit.errors import Diverged, PreflightRefused
from refit.progress import paced
from refit.store import store_for
from trainer import alive, checkpoints, collectives, device, early, engines, overfit, snapshot, tried, warm
from trainer.batches import Loader
from trainer.engines import Engine
from trainer.export import export
from trainer.inputs import validation_split
from trainer.loop import Loop
from trainer.objective import build
from trainer.pair_validation import PairValidator
from trainer.pairs import PairLoader
from trainer.probe import Probe
from trainer.samples import loader_of
from trainer.task import Task, Wire
from trainer.validation import Best, Validator

Stopping = Callable[[], float]


def run(task: Task, wire: Wire, stopping: Stopping) -> dict[str, Any]:
    """Join the other ranks and do the task.

    Raises:
        PreflightRefused: the device is not there, or too small.
    """
    device.choose(task.train)
    try:
        return _run(task, wire, stopping)
    except RuntimeError as error:
        refused = device.explained(error, task.train)
        if refused is None:
            raise
        raise refused from error


def _run(task: Task, wire: Wire, stopping: Stopping) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    collectives.watch()
    engines.connect(task.train, task.rendezvous, rank, task.ranks)
    wire.beat()
    loader = loader_of(task, rank, wire.beat, stopping)
    work = {"train": _train, "overfit": _overfit, "smoke": _smoke, "trial": _trial, "replay": _replay,
            "export": _export, "early": _early}[task.mode]  # fmt: skip
    result = work(task, loader, wire, stopping)
    distributed.barrier()
    distributed.destroy_process_group()
    return result


def _train(task: Task, loader: Loader, wire: Wire, stopping: Stopping) -> dict[str, Any]:
    with alive.while_working(wire):
        engine = _engine(task, loader)
        _go_on(engine, task)
    validator = _validator(engine, task, loader, wire, stopping)
    loop = Loop(engine, loader, task, wire, stopping, validator)
    wire.send("ready", step=task.step)
    loop.run(task.step, task.train.max_steps)
    del loop  # and what its saves were copied to
    wire.send("phase", name="export")
    with alive.while_working(wire):
        return _publish(engine, task, loader, wire, validator)


def _publish(engine: Engine, task: Task, loader: Loader, wire: Wire, validator: Validator | None) -> dict[str, Any]:
    """Export what was trained, or the best of it; all ranks together. `engine` is closed where that is another."""
    best = validator.best if validator else None
    if best is not None and task.train.validation.publish == "best":
        engine.close()
        engine = _engine(task, loader)
        # Whole, or nothing is published: what was asked for is not replaced by what is at hand.
        copies = task.train.checkpoint.copy_to  # a training that was resumed from a copy may have it only there
        found = checkpoints.of_step(task.job.output, copies, task.fingerprint, best.step, _beats(wire))
        snapshot.load(engine, task, found.uri)
    return {**export(engine, task, loader), "best": best.as_dict() if best else None}


def _validator(
    engine: Engine, task: Task, loader: Loader, wire: Wire, stopping: Stopping = lambda: 0.0
) -> Validator | None:  # fmt: skip
    """Who looks at the validation split, knowing what was the best before a resume."""
    settings = task.train.validation
    if settings.every_steps is None:
        return None
    best = checkpoints.best(task.checkpoint) if task.checkpoint else None
    split = validation_split(task.dataset, task.train)
    watcher: Any = partial(PairValidator, reference=loader.watched) if isinstance(loader, PairLoader) else Validator
    return watcher(  # type: ignore[no-any-return]
        engine, split, domains.read(task.dataset, "validation"), settings, micro_batch=task.train.micro_batch,
        best=Best(**best) if best else None, beat=wire.beat, group=task.train.tensor_parallel,
        stopping=stopping,
    )  # fmt: skip


def _export(task: Task, loader: Loader, wire: Wire, _stopping: Stopping) -> dict[str, Any]:
    """What a training does at its end, from a checkpoint."""
    engine = _engine(task, loader)
    wire.beat()
    with alive.while_working(wire):
        snapshot.load(engine, task, str(task.checkpoint))
        return export(engine, task, loader)


def _early(task: Task, loader: Loader, wire: Wire, _stopping: Stopping) -> dict[str, Any]:
    """What its training began with, which a fresh engine still is, against a checkpoint, on the same documents."""
    engine = _engine(task, loader)
    warm.begin(engine, task)
    wire.beat()
    before = early.losses(engine, task, wire)
    snapshot.load(engine, task, str(task.checkpoint))
    return early.compare(early.losses(engine, task, wire), before, task.train.early)


def _trial(task: Task, loader: Loader, wire: Wire, stopping: Stopping) -> dict[str, Any]:
    """Both trials by one set of ranks: what a start of them costs is more than a small trial."""
    learnt = _overfit(task, loader, wire, stopping)
    return {tried.OVERFIT: learnt, tried.SMOKE: _smoke(task, loader, wire, stopping)}


def _overfit(task: Task, loader: Loader, wire: Wire, _stopping: Stopping) -> dict[str, Any]:
    few = overfit.few(task, loader.ranks)
    engine = _engine(few, loader)
    warm.begin(engine, few)
    learnt = overfit.learn(engine, few, loader, wire, overfit.steps_allowed(task.train))
    engine.close()  # the smoke run makes one more; two at once would need more memory than a training does
    return learnt


def _smoke(task: Task, loader: Loader, wire: Wire, stopping: Stopping) -> dict[str, Any]:
    """A few steps, a look at the validation split if the training looks, a save, and a restore in a fresh engine that
    must then take the very same step.
    """
    last = task.train.smoke_steps - 1
    engine = _engine(task, loader)
    warm.begin(engine, task)
    loop = Loop(engine, loader, task, wire, stopping)
    wire.send("ready", step=0)
    records = [loop.step(number) for number in range(last)]
    began = time.perf_counter()
    loop.save(last)
    saved = time.perf_counter()
    records.append(loop.step(last))
    uri = checkpoints.address(task.job.output, last)
    size = snapshot.size(task.job.output, last)
    look = _first_look(engine, task, loader, wire)
    engine.close()
    del engine, loop
    began_restore = time.perf_counter()
    again = _engine(task, loader)
    snapshot.load(again, task, uri)
    restored = time.perf_counter()
    repeated = Loop(again, loader, task, wire, stopping).step(last)
    if (repeated["loss"], repeated["grad_norm"]) != (records[-1]["loss"], records[-1]["grad_norm"]):
        raise PreflightRefused(
            f"after a restore step {last + 1} gives loss {repeated['loss']!r}, before it gave {records[-1]['loss']!r}: "
            "a resume would not be exact on this machine."
        )
    distributed.barrier()
    if distributed.get_rank() == 0:
        store_for(uri).remove(uri)
    timed = records[1:][-2:]  # the first step warms caches up
    seconds = sum(record["seconds"] for record in timed) / len(timed)
    return {
        "seconds_per_step": seconds,
        "tokens_per_second": sum(record["tokens"] for record in timed) / len(timed) / seconds,
        "losses": [record["loss"] for record in records],
        "save_seconds": saved - began,
        "restore_seconds": restored - began_restore,
        "checkpoint_bytes": size,
        "peak_bytes_per_rank": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "dtype": task.dtype,
        **device.memory(),
        **look,
    }


def _first_look(engine: Engine, task: Task, loader: Loader, wire: Wire) -> dict[str, Any]:
    """The look at the validation split that a training would take after hours; empty where it takes none.

    Raises:
        PreflightRefused: it fails, for want of memory or for anything else.
    """
    validator = _validator(engine, task, loader, wire)
    if validator is None:
        return {}
    wire.send("phase", name=tried.LOOK)
    began = time.perf_counter()
    try:
        seen = validator.look(task.train.smoke_steps)
    except Exception as error:
        raise PreflightRefused(tried.blind(task.train, f"{type(error).__name__}: {error}")) from error
    wire.send("phase", name="smoke")
    return {"validation_loss": seen.loss, "validation_seconds": time.perf_counter() - began}


def _replay(task: Task, loader: Loader, wire: Wire, stopping: Stopping) -> dict[str, Any]:
    """Go on from the checkpoint before a step that was given up, and take that step again, looking where it begins."""
    engine = _engine(task, loader)
    _go_on(engine, task)
    loop = Loop(engine, loader, task, wire, stopping)
    wire.send("ready", step=task.step)
    losses = [loop.step(number)["loss"] for number in range(task.step, task.until)]
    probe, why = Probe(), None
    with engine.probing(probe):
        try:
            why = loop.step(task.until).get("why")  # of a step that was skipped, and is again
        except Diverged as error:
            why = str(error)
    told: list[tuple[str | None, str]] = [(None, "")] * task.ranks
    distributed.all_gather_object(told, (probe.first, loop.numbers.digest))
    firsts, random = zip(*told, strict=True)
    return {"replayed": why is not None, "losses": losses, "first": list(firsts), "random": list(random)}


def _beats(wire: Wire) -> Callable[[], None]:
    """A sign of life a second for as long as something is at work; a pipe is no place for one a megabyte."""
    return paced(wire.beat, 1.0)


def _go_on(engine: Engine, task: Task) -> None:
    """From the checkpoint that the launcher has found, or from where the training begins."""
    if task.checkpoint:
        snapshot.load(engine, task, task.checkpoint)
    else:
        warm.begin(engine, task)


def _engine(task: Task, loader: Loader) -> Engine:
    objective = build(task.base, task.train, dtype=task.dtype, length=loader.length)
    return engines.start(objective, task.train, task.ranks)
