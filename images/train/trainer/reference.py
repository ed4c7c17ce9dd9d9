"""What the base model says of all pairs, computed once before a full training: no second model sits in memory then.

    reference-<name>.safetensors   packs (their numbers), first (of each, its first pair; one more), values (pairs, 2)
    reference-<name>.json          its sha256, written last

They lie in the job's folder. The name follows from the training (its fingerprint covers base and data), the arithmetic
and which packs are asked for. A file that is not what its hash says is made again, and so is one that is not there: the
same base says the same of the same packs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save
from torch import Tensor, distributed

from refit import files, log
from refit.fingerprint import digest
from refit.packed import Packed

Index = NDArray[np.int64]
Say = Callable[[Index], Tensor]
"""The summed log probabilities of some packs' pairs, shape (pairs, 2), in float64."""


@dataclass(frozen=True)
class Reference:
    """Summed log probabilities `values` (pairs, 2) of both sides, pack by pack: `packs` rise, `first` says where each
    begins."""

    packs: Index
    first: Index
    values: NDArray[np.float64]

    def of(self, packs: Index) -> Tensor:
        """Those of some packs' pairs, in the packs' order, shape (pairs, 2)."""
        places = np.searchsorted(self.packs, packs)
        found = [self.values[self.first[place] : self.first[place + 1]] for place in places.tolist()]
        return torch.from_numpy(np.concatenate([np.zeros((0, 2)), *found]))


def name_of(training: str, *, split: str, dtype: str, packs: Index) -> str:
    """The name of a reference."""
    asked = hashlib.sha256(packs.astype("<i8").tobytes()).hexdigest()
    return digest({"training": training, "split": split, "dtype": dtype, "packs": asked})[:16]


def read(folder: Path, name: str) -> Reference | None:
    """The reference of a name, None where it is not there whole."""
    data, note = _paths(folder, name)
    if not (data.is_file() and note.is_file()):
        return None
    held = data.read_bytes()
    try:
        if json.loads(note.read_bytes())["sha256"] == hashlib.sha256(held).hexdigest():
            arrays = load(held)
            return Reference(arrays["packs"], arrays["first"], arrays["values"])
    except (ValueError, KeyError, TypeError, SafetensorError):
        pass
    log.event("reference_damaged", file=str(data), remedy="it is computed again")
    return None


def write(folder: Path, name: str, reference: Reference) -> None:
    """Keep a reference."""
    data, note = _paths(folder, name)
    held = save({"packs": reference.packs, "first": reference.first, "values": reference.values})
    files.write(data, held)
    files.write(note, json.dumps({"sha256": hashlib.sha256(held).hexdigest()}).encode())


def kept(folder: Path, name: str, make: Callable[[], Reference]) -> Reference:
    """The reference of a name, made by all ranks together where it is not there; rank 0 keeps it."""
    found = read(folder, name)
    missing = torch.tensor([found is None], dtype=torch.int64)
    distributed.all_reduce(missing)
    if found is not None and not missing.item():
        return found
    made = make()
    if distributed.get_rank() == 0:
        write(folder, name, made)
    return made


def compute(
    split: Packed, packs: Index, counts: Callable[[NDArray[Any]], Index], say: Say, *, at_once: int
) -> Reference:
    """Ask for the pairs of all `packs` (rising), `at_once` of them at a time; all ranks together, each its share.

    What is asked at once does not depend on how many ranks there are, so the answers do not either.
    """
    parts = [packs[at : at + at_once] for at in range(0, len(packs), at_once)]
    of_each = np.concatenate([np.zeros(0, np.int64), *(counts(split.segments[part]) for part in parts)])
    first = np.concatenate([np.zeros(1, np.int64), np.cumsum(of_each)])
    values = torch.zeros((int(first[-1]), 2), dtype=torch.float64)
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    for number in range(rank, len(parts), ranks):
        at = number * at_once
        values[first[at] : first[min(at + at_once, len(packs))]] = say(parts[number])
    distributed.all_reduce(values)
    return Reference(packs, first, values.numpy())


def _paths(folder: Path, name: str) -> tuple[Path, Path]:
    return folder / f"reference-{name}.safetensors", folder / f"reference-{name}.json"
