"""What a checkpoint holds: each rank copies its part and writes it; rank 0 makes them a checkpoint, or nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, distributed

from refit import files
from refit.errors import BadInput, Infrastructure
from refit.fingerprint import recipe_digest
from refit.manifest import Manifest
from refit.store import Draft, join, store_for
from trainer import checkpoints, position, randomness, warm, writer
from trainer.engines import Engine
from trainer.fragments import WEIGHT
from trainer.randomness import Numbers
from trainer.state import State
from trainer.state import name_of as state_of
from trainer.task import Task


class TakenOver(Infrastructure):
    """Another trainer writes to the output: this one ends."""


@dataclass(frozen=True)
class Part:
    """A rank's part of a checkpoint, copied: the training may go on. `random` is None in a fast one."""

    rank: int
    state: State
    random: dict[str, Any] | None

    @classmethod
    def take(cls, engine: Engine, kind: str, buffers: dict[str, Tensor]) -> Part:
        """Copy what belongs into a checkpoint of a kind, into memory of an earlier copy where there is some."""
        rank = distributed.get_rank()
        if kind == checkpoints.FAST:
            return cls(rank, engine.state((WEIGHT,), buffers), None)
        return cls(rank, engine.state(buffers=buffers), Numbers.now().document())

    def write(self, folder: Path) -> None:
        """Write it into a draft. Each file has its name once it is whole."""
        if self.random is not None:
            files.write(folder / _rng_name(self.rank), json.dumps(self.random).encode())
        self.state.write(folder, self.rank)


def written(folder: Path, ranks: int) -> bool:
    """Whether all ranks' parts are in a draft. The state is what a rank writes last."""
    return all((folder / state_of(rank)).is_file() for rank in range(ranks))


def commit(draft: Draft, task: Task, step: int, kind: str, facts: dict[str, Any]) -> None:
    """Make a draft with all ranks' parts a checkpoint.

    Raises:
        TakenOver: another trainer has taken the output over; nothing is committed.
    """
    uri = checkpoints.address(task.job.output, step, kind)
    _still_ours(task)
    store_for(uri).remove(uri)  # of a future that was abandoned, or damaged: this one takes its place
    of = warm.weights_of(task.train, task.base_digest)
    told = {"data": position.after(step, task.train, task.data)} if task.data else {}
    facts = {
        "step": step, "ranks": task.ranks, "zero_stage": task.train.zero_stage, warm.WEIGHTS_OF: of,
        "recipe": recipe_digest(task.train), **told, **facts,
    }  # fmt: skip
    draft.commit(Manifest(kind=kind, fingerprint=task.fingerprint, facts=facts), check=lambda: _still_ours(task))


def load(engine: Engine, task: Task, uri: str) -> None:
    """Go back to a checkpoint: weights, optimizer, and last the random numbers of this rank.

    Raises:
        BadInput: it holds weights only, and the task is to train.
    """
    folder = store_for(uri).local(uri)
    if checkpoints.kind_of(uri) == checkpoints.FAST and task.mode != "export":
        raise BadInput(f"{uri}: holds weights only, without the optimizer; nothing is resumed from it.")
    engine.load(folder, weights_only=checkpoints.kind_of(uri) == checkpoints.FAST)
    state = folder / _rng_name(distributed.get_rank())
    if state.is_file():  # not there when more ranks go on than saved
        randomness.go_on(json.loads(state.read_text(encoding="utf-8")))


def size(output: str, step: int) -> int:
    """Bytes of a checkpoint."""
    manifest = store_for(output).manifest(join(checkpoints.folder(output), f"step-{step}"))
    return sum(file.size for file in manifest.files) if manifest else 0


def _still_ours(task: Task) -> None:
    if not writer.holds(task.job.output, task.token):
        raise TakenOver(f"{task.job.output}: another trainer has taken over; this one commits nothing.")


def _rng_name(rank: int) -> str:
    return f"rng-rank-{rank}.json"
