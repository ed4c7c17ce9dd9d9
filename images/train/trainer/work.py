"""What all ranks do together: train and export, try a few steps and a restore, or export what a checkpoint holds."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from typing import Any

from torch import distributed

from refit.errors import PreflightRefused
from refit.store import store_for
from trainer import checkpoints, snapshot
from trainer.batches import Loader
from trainer.engine import Engine, connect
from trainer.export import export
from trainer.inputs import train_split
from trainer.loop import Loop
from trainer.objective import build
from trainer.task import Task, Wire

Stopping = Callable[[], bool]


def run(task: Task, wire: Wire, stopping: Stopping) -> dict[str, Any]:
    """Join the other ranks and do the task."""
    rank = int(os.environ["RANK"])
    connect(task.rendezvous, rank, task.ranks)
    wire.send("beat")
    loader = Loader(train_split(task.dataset), task.train, rank=rank, ranks=task.ranks)
    work = {"train": _train, "smoke": _smoke, "export": _export}[task.mode]
    result = work(task, loader, wire, stopping)
    distributed.barrier()
    distributed.destroy_process_group()
    return result


def _train(task: Task, loader: Loader, wire: Wire, stopping: Stopping) -> dict[str, Any]:
    engine = _engine(task, loader)
    wire.send("beat")
    if task.checkpoint:
        snapshot.load(engine, task, task.checkpoint)
    loop = Loop(engine, loader, task, wire, stopping)
    wire.send("ready", step=task.step)
    loop.run(task.step, task.train.max_steps)
    wire.send("phase", name="export")
    return export(engine, task, loader)


def _export(task: Task, loader: Loader, wire: Wire, _stopping: Stopping) -> dict[str, Any]:
    """What a training does at its end, from a checkpoint."""
    engine = _engine(task, loader)
    wire.send("beat")
    snapshot.load(engine, task, str(task.checkpoint))
    return export(engine, task, loader)


def _smoke(task: Task, loader: Loader, wire: Wire, stopping: Stopping) -> dict[str, Any]:
    """A few steps, a save, and a restore in a fresh engine that must then take the very same step."""
    last = task.train.smoke_steps - 1
    engine = _engine(task, loader)
    loop = Loop(engine, loader, task, wire, stopping)
    wire.send("ready", step=0)
    records = [loop.step(number) for number in range(last)]
    began = time.perf_counter()
    loop.save(last)
    saved = time.perf_counter()
    records.append(loop.step(last))
    uri = checkpoints.address(task.job.output, last)
    size = snapshot.size(task.job.output, last)
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
    # The first step warms caches up; where there is only one, it must do.
    timed = (records[1:] or records)[-2:]
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
    }


def _engine(task: Task, loader: Loader) -> Engine:
    return Engine(build(task.base, task.train, dtype=task.dtype, length=loader.length), task.train)
