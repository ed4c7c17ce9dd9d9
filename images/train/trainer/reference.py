"""What the base model says of all pairs, computed once before a full training: no second model sits in memory then.

    reference-<name>.safetensors   packs (their numbers), first (of each, its first pair; one more), values (pairs, 2)
    reference-<name>.json          its sha256, written last

They lie in the job's folder. The name follows from the training (its fingerprint covers base and data), the arithmetic
and which packs are asked for. A file that is not what its hash says is made again, and so is one that is not there: the
same base says the same of the same packs.

To ask takes as long as a third of an epoch. What is known is kept every `PART_SECONDS`, as references of some of the
packs (`reference-<name>.<number>`), and the next start asks for the rest, on any number of ranks.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
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
from refit.errors import Preempted
from refit.fingerprint import digest
from refit.packed import Packed

Index = NDArray[np.int64]
Say = Callable[[Index], Tensor]
"""The summed log probabilities of some packs' pairs, shape (pairs, 2), in float64."""

PART_SECONDS = 60.0
"""At most this much of the asking is lost when ranks are killed."""


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
        for path in folder.glob(f"reference-{name}.*.*"):  # its parts
            path.unlink()
    return made


class Asking:
    """Asks for the pairs of all `packs` (rising), `at_once` of them at a time, in steps that all ranks take together,
    each its share of them; goes on from the parts that lie in the folder.

    What is asked at once does not depend on how many ranks there are, nor on what is known, so the answers do not
    either.
    """

    def __init__(
        self, folder: Path, name: str, split: Packed, packs: Index, counts: Callable[[NDArray[Any]], Index], *,
        at_once: int, part_seconds: float = PART_SECONDS,
    ) -> None:  # fmt: skip
        self._folder, self._name, self._packs, self._part_seconds = folder, name, packs, part_seconds
        self._at_once = at_once
        self._groups = [packs[at : at + at_once] for at in range(0, len(packs), at_once)]
        of_each = [counts(split.segments[group]) for group in self._groups]
        self._pairs = np.concatenate([np.zeros(0, np.int64), *of_each])
        self._first = _firsts(self._pairs)
        self._values = torch.zeros((int(self._first[-1]), 2), dtype=torch.float64)

    def all(self, say: Say, stopping: Callable[[], float]) -> Reference:
        """Ask for all that is not known.

        Raises:
            Preempted: a rank was told to stop; what is known by then is kept.
        """
        left, rank, ranks = self._unknown(), distributed.get_rank(), distributed.get_world_size()
        fresh: list[int] = []
        kept_at = time.monotonic()
        for at in range(0, len(left), ranks):
            now = left[at : at + ranks]
            if rank < len(now):
                self._of(now[rank]).copy_(say(self._groups[now[rank]]))
            fresh += now
            is_due = rank == 0 and time.monotonic() - kept_at >= self._part_seconds
            votes = torch.tensor([stopping() > 0, is_due], dtype=torch.int64)
            distributed.all_reduce(votes)
            stop, due = votes.tolist()
            if stop or due:
                self._keep(fresh)
                fresh, kept_at = [], time.monotonic()
            if stop:
                distributed.barrier()  # the launcher gives us little time once one rank has said that it ends
                raise Preempted(
                    f"told to stop while the reference is asked; {len(left) - at - len(now)} of {len(self._groups)} "
                    "micro batches are left to ask"
                )
        distributed.all_reduce(self._values)
        return Reference(self._packs, self._first, self._values.numpy())

    def _places(self, number: int) -> slice:
        """Which of the packs are a group."""
        return slice(number * self._at_once, min((number + 1) * self._at_once, len(self._packs)))

    def _of(self, number: int) -> Tensor:
        """The place of a group's values."""
        places = self._places(number)
        return self._values[self._first[places.start] : self._first[places.stop]]

    def _unknown(self) -> list[int]:
        """The groups that are in no part; the others' values are put in their place, on rank 0."""
        known = torch.zeros(len(self._groups), dtype=torch.int64)
        if distributed.get_rank() == 0:
            for part in self._parts():
                for number in np.unique(np.searchsorted(self._packs, part.packs) // self._at_once).tolist():
                    self._of(number).copy_(part.of(self._groups[number]))
                    known[number] = 1
            log.event("reference", name=self._name, known=int(known.sum()), of=len(self._groups))
        distributed.all_reduce(known)
        return [number for number, there in enumerate(known.tolist()) if not there]

    def _parts(self) -> list[Reference]:
        names = [path.stem.removeprefix("reference-") for path in self._folder.glob(f"reference-{self._name}.*.json")]
        return [part for name in sorted(names) if (part := read(self._folder, name)) is not None]

    def _keep(self, numbers: Sequence[int]) -> None:
        """Keep what all ranks together were told of some groups, under the first one's number."""
        values = torch.cat([self._of(number) for number in numbers])
        distributed.all_reduce(values)
        if distributed.get_rank() == 0:
            packs = np.concatenate([self._groups[number] for number in numbers])
            first = _firsts(np.concatenate([self._pairs[self._places(number)] for number in numbers]))
            write(self._folder, f"{self._name}.{numbers[0]}", Reference(packs, first, values.numpy()))


def _firsts(pairs: Index) -> Index:
    """Where each pack's pairs begin, by how many there are; one more is the end of the last."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(pairs)])


def _paths(folder: Path, name: str) -> tuple[Path, Path]:
    return folder / f"reference-{name}.safetensors", folder / f"reference-{name}.json"
