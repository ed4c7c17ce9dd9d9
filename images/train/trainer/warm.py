"""A training that begins with another one's weights: whether the checkpoint fits, and how it is taken in.

`train.warm_start` names a checkpoint, full or of weights alone, of a training of the same base model by the same
method. Step 0 has its weights; optimizer, random numbers and the order of the data are those of any fresh training, and
the learning rate is warmed up by the recipe's own `warmup_steps`. The checkpoint's content is part of the training's
name: like dataset and base model it stays where it is. A resume reads its manifest, and no byte of its weights; with
DPO it hashes them, for its reference may have to be computed again.

What it does not do: take over an optimizer (`trainer run` on that training's own output goes on with it), or fit an
adapter of one rank into one of another.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from refit.errors import BadInput, Damaged
from refit.manifest import Manifest
from refit.spec import Train
from refit.store import Heard, store_for, unheard
from trainer import checkpoints
from trainer.bases import safetensors_header
from trainer.checkpoints import Checkpoint

if TYPE_CHECKING:
    from trainer.engines import Engine
    from trainer.task import Task

WEIGHTS_OF = "weights_of"
"""The fact of a checkpoint's manifest that says what its weights are weights of."""

_TOLD = {
    "base": "is of the base model {theirs}, train.base holds {ours}",
    "method": "is of method {theirs}, train.method is {ours}",
    "rank": "holds an adapter of rank {theirs}, train.lora.rank is {ours}",
    "alpha": "holds an adapter of alpha {theirs}, train.lora.alpha is {ours}",
}


def weights_of(train: Train, base: str) -> dict[str, Any]:
    """What weights fit into a training, and what is in its checkpoints; `base` is the base model's content digest."""
    told = {"base": base, "method": train.method}
    return told if train.method == "full" else {**told, "rank": train.lora.rank, "alpha": train.lora.alpha}


def digest_of(train: Train) -> str | None:
    """The content digest of the checkpoint that a training begins with; None where it begins with its base model."""
    return None if train.warm_start is None else _manifest(train.warm_start).content_digest()


def fit(train: Train, base: str) -> str | None:
    """`digest_of`, of a checkpoint that fits into a training of a base model.

    Raises:
        BadInput: it is not there, is none, or is of another model; the message names both values.
    """
    if train.warm_start is None:
        return None
    manifest = _manifest(train.warm_start)
    ours, theirs = weights_of(train, base), manifest.facts.get(WEIGHTS_OF)
    if not isinstance(theirs, dict):
        raise BadInput(
            f"train.warm_start: {train.warm_start} does not say what its weights are of; an older trainer wrote it. "
            "Export it by `trainer export`, and set train.base to that model."
        )
    for name, told in _TOLD.items():
        if ours.get(name) != theirs.get(name):
            said = told.format(ours=ours.get(name), theirs=theirs.get(name))
            raise BadInput(
                f"train.warm_start: {train.warm_start} {said}. Set it to that, or export the checkpoint by "
                "`trainer export` and set train.base to that model."
            )
    return manifest.content_digest()


def verified(train: Train, named: str | None, heard: Heard = unheard) -> Checkpoint | None:
    """The checkpoint to begin with, every file hashed; None where there is none to begin with.

    Args:
        named: the content digest that the training's name was made from.

    Raises:
        BadInput: it is damaged, or another one than the training is named by.
    """
    if train.warm_start is None:
        return None
    found = checkpoints.verify(train.warm_start, heard)
    if (now := found.manifest.content_digest()) != named:
        raise BadInput(
            f"train.warm_start: {train.warm_start} was replaced meanwhile: this training is named by {named}, and "
            f"{now} is there. Begin a training anew with what is there, or put the checkpoint back."
        )
    return found


def begin(engine: Engine, task: Task) -> None:
    """Have an engine that has taken no step begin where the task's training does; all ranks together.

    Raises:
        BadInput: the checkpoint holds less, or more, than the model has weights that learn. Nothing is trained.
    """
    uri = task.train.warm_start
    if uri is None:
        return
    folder = store_for(uri).local(uri)
    if task.train.tensor_parallel == 1:  # there a rank counts its shards only
        held, wanted = elements(folder), engine.sizes()[1]
        if held != wanted:
            raise BadInput(f"train.warm_start: {uri} holds {held:,} weights, and {wanted:,} are trained here.")
    engine.load(folder, weights_only=True)


def elements(folder: Path) -> int:
    """How many weights a checkpoint holds, all ranks' files together."""
    headers = [safetensors_header(path) for path in folder.glob("state-rank-*.safetensors")]
    shapes = [one["shape"] for header in headers for name, one in header.items() if name.endswith("/weight")]
    return sum(math.prod(shape) for shape in shapes)


def _manifest(uri: str) -> Manifest:
    kind = checkpoints.kind_of(uri)
    try:
        manifest = store_for(uri).manifest(uri)
    except Damaged as error:
        raise BadInput(f"train.warm_start: {error}") from error
    if manifest is None:
        raise BadInput(
            f"train.warm_start: {uri}: no checkpoint there. Look at what its training has kept "
            "(train.checkpoint.keep_last, keep_fast), or give another one."
        )
    if manifest.kind != kind:
        raise BadInput(f"train.warm_start: {uri} holds a {manifest.kind}, expected a {kind}.")
    return manifest
