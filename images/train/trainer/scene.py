"""What is kept of a step that went wrong: enough to look at it, and to take it again (`trainer replay`).

scene.json   the step, why it was given up, its packs, loss and learning rate, the checkpoint before it, the norm of
             the gradient layer by layer, a digest of each rank's random numbers before the step
scene.npz    tokens, segments and mask of its packs, as the dataset has them; those random numbers, as JSON

A step that was skipped (`train.skip`) leaves the same as scenes/step-N.json and .npz; the newest few are kept. Rank 0
writes all of them on its machine; where the output is elsewhere, the launcher uploads them, and there all are kept, at
most `train.skip.budget`.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from refit import files
from refit.errors import BadInput
from refit.fingerprint import digest
from refit.packed import Packed
from refit.store import FileStore, join, store_for

SCENE = "scene.json"
SKIPPED = "scenes"
KEPT = 16
"""So many scenes of skipped steps are kept: the newest."""

_DEPTH = ("layers", "h", "blocks")
"""What a list of layers is called in models."""


@dataclass(frozen=True)
class Scene:
    """A step that was given up: its number (from 1), and that of the checkpoint before it, None from the start.

    `random` has a digest of each rank's random numbers before it, and is empty in scenes of long ago.
    """

    step: int
    why: str
    checkpoint: int | None
    random: tuple[str, ...] = ()


def keep(
    folder: Path, facts: Mapping[str, Any], packs: Iterable[int], split: Packed, random: Sequence[dict[str, Any]],
    *, name: str = Path(SCENE).stem,
) -> None:  # fmt: skip
    """Write a scene; `facts` are scene.json's, `random` is where each rank's random numbers stood."""
    own = list(packs)
    arrays = io.BytesIO()
    np.savez_compressed(
        arrays, packs=np.array(own), tokens=split.tokens[own], segments=split.segments[own], mask=split.mask[own],
        random=np.frombuffer(json.dumps(random).encode(), np.uint8),
    )  # fmt: skip
    files.write(folder / f"{name}.npz", arrays.getvalue())
    told = {**facts, "packs": own, "random": [digest(one) for one in random]}
    files.write(folder / f"{name}.json", json.dumps(told, indent=1).encode())


def keep_skipped(
    folder: Path, facts: Mapping[str, Any], packs: Iterable[int], split: Packed, random: Sequence[dict[str, Any]]
) -> None:
    """Write the scene of a step that was skipped, beside those of the others."""
    keep(folder / SKIPPED, facts, packs, split, random, name=f"step-{facts['step']}")
    known = sorted((folder / SKIPPED).glob("step-*.json"), key=lambda path: int(path.stem.removeprefix("step-")))
    for old in known[:-KEPT]:
        old.unlink()
        old.with_suffix(".npz").unlink(missing_ok=True)


def upload(folder: Path, output: str, step: int | None = None) -> None:
    """Where the output is not this folder itself, put there what is kept of the last step, or of one that was skipped.

    Raises:
        StoreUnavailable: it does not answer.
    """
    store, name = store_for(output), _name(step)
    if isinstance(store, FileStore):
        return
    for suffix in (".npz", ".json"):  # the latter is what says that there is a scene
        if (kept := folder / f"{name}{suffix}").is_file():
            store.write(join(output, kept.relative_to(folder).as_posix()), kept.read_bytes())


def _name(step: int | None) -> str:
    """A scene's files below the output, without their endings."""
    return Path(SCENE).stem if step is None else f"{SKIPPED}/step-{step}"


def read(output: str, step: int | None = None) -> Scene:
    """The scene of the step that ended a training, or of one that it skipped.

    Raises:
        BadInput: it has none.
    """
    name = f"{_name(step)}.json"
    place = join(output, name)
    store = store_for(place)
    if not store.exists(place):
        raise BadInput(f"{output}: there is no {name}, so no step was given up there; nothing to take again.")
    found = json.loads(store.read(place))
    return Scene(int(found["step"]), str(found["why"]), found["checkpoint"], tuple(found.get("random", ())))


def by_layer(norms: Iterable[tuple[str, float]]) -> dict[str, str]:
    """Norms of parameters' gradients put together layer by layer, as text: JSON has no NaN."""
    sums: dict[str, float] = {}
    for name, norm in norms:
        layer = _layer(name)
        sums[layer] = sums.get(layer, 0.0) + norm * norm
    return {layer: f"{math.sqrt(total):.6g}" for layer, total in sums.items()}


def _layer(name: str) -> str:
    parts = name.split(".")
    for at, part in enumerate(parts[:-1]):
        if part in _DEPTH and parts[at + 1].isdigit():
            return ".".join(parts[: at + 2])
    return ".".join(parts[:-1]) or name
