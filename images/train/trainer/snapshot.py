"""What a checkpoint holds, and how all ranks write one together so that it is there whole or not at all."""

from __future__ import annotations

import base64
import json
import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed

from refit.errors import Infrastructure
from refit.manifest import Manifest
from refit.store import join, store_for
from trainer import checkpoints, writer
from trainer.engines import Engine
from trainer.task import Task


def save(engine: Engine, task: Task, step: int, facts: dict[str, Any], best: int | None = None) -> None:
    """Write the checkpoint of `step` finished steps; all ranks together. Afterwards only the newest few are kept, and
    that of the step `best`.

    Raises:
        Infrastructure: another trainer has taken the output over.
    """
    rank = distributed.get_rank()
    uri = checkpoints.address(task.job.output, step)
    store = store_for(uri)
    with ExitStack() as stack:
        draft = stack.enter_context(store.publish(uri)) if rank == 0 else None
        folder = Path(_from_rank_0(str(draft.path) if draft else None))
        engine.state().write(folder, rank)
        (folder / _rng_name(rank)).write_text(json.dumps(_rng_state()), encoding="utf-8")
        distributed.barrier()
        if draft is not None:
            if not writer.holds(task.job.output, task.token):
                raise Infrastructure(f"{task.job.output}: another trainer has taken over; this one commits nothing.")
            store.remove(uri)  # of a future that was abandoned, or damaged: this one takes its place
            draft.commit(
                Manifest(
                    kind=checkpoints.KIND, fingerprint=task.fingerprint,
                    facts={"step": step, "ranks": task.ranks, "zero_stage": task.train.zero_stage, **facts},
                )
            )  # fmt: skip
            checkpoints.retain(task.job.output, task.train.checkpoint.keep_last, best)
    distributed.barrier()  # nobody goes on, or ends, as if it were there before it is


def load(engine: Engine, task: Task, uri: str) -> None:
    """Go back to a checkpoint: weights, optimizer, and last the random numbers of this rank."""
    folder = store_for(uri).local(uri)
    engine.load(folder)
    state = folder / _rng_name(distributed.get_rank())
    if state.is_file():  # not there when more ranks go on than saved
        _set_rng_state(json.loads(state.read_text(encoding="utf-8")))


def size(output: str, step: int) -> int:
    """Bytes of a checkpoint."""
    manifest = store_for(output).manifest(join(checkpoints.folder(output), f"step-{step}"))
    return sum(file.size for file in manifest.files) if manifest else 0


def _from_rank_0(value: str | None) -> str:
    held = [value]
    distributed.broadcast_object_list(held, src=0)
    return str(held[0])


def _rng_name(rank: int) -> str:
    return f"rng-rank-{rank}.json"


def _rng_state() -> dict[str, Any]:
    name, keys, place, has_gauss, gauss = np.random.get_state(legacy=True)
    version, numbers, gauss_next = random.getstate()
    return {
        "torch": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
        "numpy": [name, [int(key) for key in keys], int(place), int(has_gauss), float(gauss)],
        "python": [version, list(numbers), gauss_next],
    }


def _set_rng_state(state: dict[str, Any]) -> None:
    raw = np.frombuffer(base64.b64decode(state["torch"]), dtype=np.uint8).copy()
    torch.set_rng_state(torch.from_numpy(raw))
    name, keys, place, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), place, has_gauss, gauss))
    version, numbers, gauss_next = state["python"]
    random.setstate((version, tuple(numbers), gauss_next))
