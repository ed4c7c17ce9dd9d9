"""The state of a training on disk: weights and optimizer in pieces, a safetensors file a rank, read by any ranks.

    state-rank-<r>.safetensors    float32, one-dimensional, `<parameter>@<first element>/<kind>` with the kinds of
                                  `fragments`; of a shard that is no stretch of its parameter
                                  `<parameter>@<first element>~<window>/<kind>`; its metadata has the optimizer's steps

Who reads takes what it holds itself out of whichever files have it, by slices: nobody has the whole in memory, and
nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from refit import files
from refit.errors import BadInput
from trainer.fragments import KINDS, WEIGHT, Fragment, Window


@dataclass(frozen=True)
class State:
    """Copies of a rank's pieces, as they were after so many steps of the optimizer."""

    tensors: dict[str, Tensor]
    steps: int

    @classmethod
    def of(
        cls, fragments: Iterable[Fragment], steps: int, *, kinds: Collection[str] = KINDS,
        buffers: dict[str, Tensor] | None = None,
    ) -> Self:  # fmt: skip
        """Copy the pieces: what is trained on may change from here on.

        Args:
            kinds: what is copied of each piece.
            buffers: memory of an earlier copy that is written over, and that grows by what is new; the earlier copy
                must not be in use any more. Copying to memory that is there is seven times as fast.
        """
        held, copies = {} if buffers is None else buffers, {}
        for one in fragments:
            for kind in kinds:
                tensor, name = one.tensors[kind].detach(), f"{one.name}@{_written(one)}/{kind}"
                if name in held and held[name].shape == tensor.shape and held[name].dtype == tensor.dtype:
                    held[name].copy_(tensor)
                else:
                    held[name] = tensor.to("cpu", copy=True)
                copies[name] = held[name]
        return cls(copies, steps)

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def write(self, folder: Path, rank: int) -> None:
        """Write this rank's file; it has its name once it is whole and on the disk."""
        with files.replacing(folder / name_of(rank)) as draft:
            save_file(self.tensors, draft, metadata={"steps": str(self.steps)})


@dataclass(frozen=True)
class _Place:
    start: int
    size: int
    file: Any
    key: str
    window: Window | None


class Reader:
    """All ranks' files of a folder; a context."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open = ExitStack()
        self._places: dict[tuple[str, str], list[_Place]] = {}
        self.steps = 0

    def __enter__(self) -> Self:
        paths = sorted(self._folder.glob(name_of("*")))
        if not paths:
            raise BadInput(f"{self._folder}: no {name_of('<r>')} there; it is no checkpoint of this trainer.")
        try:
            for path in paths:
                self._add(self._open.enter_context(safe_open(path, framework="pt")))
        except (SafetensorError, OSError) as error:
            raise BadInput(f"{self._folder}: a file of the state cannot be read: {error}") from error
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def read(self, name: str, kind: str, start: int, size: int) -> Tensor:
        """Elements start to start + size of a parameter's kind, from whichever files have them.

        Raises:
            BadInput: not all of them are there.
        """
        out, found = torch.empty(size, dtype=torch.float32), 0
        for place in self._places.get((name, kind), ()):
            if place.window is not None:
                places = place.window.places(place.start, place.size) - start
                inside = (places >= 0) & (places < size)
                if inside.any():
                    out[places[inside]] = place.file.get_tensor(place.key)[inside]
                    found += int(inside.sum())
                continue
            first, last = max(start, place.start), min(start + size, place.start + place.size)
            if first < last:
                piece = place.file.get_slice(place.key)[first - place.start : last - place.start]
                out[first - start : last - start] = piece
                found += last - first
        if found != size:
            raise BadInput(
                f"{self._folder}: {found} of {size} elements of {name} ({kind}) are there. The checkpoint is of "
                "another model, or a rank's file is missing."
            )
        return out

    def seen(self, name: str, kind: str, start: int, size: int, window: Window | None) -> Tensor:
        """Elements start to start + size of a shard, or of the parameter where there is no window."""
        if window is None:
            return self.read(name, kind, start, size)
        places = window.places(start, size)
        first = int(places[0])
        return self.read(name, kind, first, int(places[-1]) + 1 - first)[places - first]

    def whole(self, name: str, size: int) -> Tensor:
        """All weights of a parameter of so many elements, flattened."""
        return self.read(name, WEIGHT, 0, size)

    def fill(self, fragments: Sequence[Fragment], kinds: Collection[str] = KINDS) -> None:
        """Put the state, or only some kinds of it, into an engine's pieces."""
        for one in fragments:
            for kind in kinds:
                one.tensors[kind].copy_(self.seen(one.name, kind, one.start, len(one), one.window))

    def _add(self, file: Any) -> None:
        self.steps = max(self.steps, int((file.metadata() or {}).get("steps", 0)))
        for key in file.keys():  # noqa: SIM118 (it is no mapping)
            name, _, rest = key.rpartition("@")
            where, _, kind = rest.partition("/")
            start, *window = (int(number) for number in where.split("~"))
            (size,) = file.get_slice(key).get_shape()
            place = _Place(start, size, file, key, Window(*window) if window else None)
            self._places.setdefault((name, kind), []).append(place)


def _written(one: Fragment) -> str:
    return "~".join(str(number) for number in (one.start, *(one.window or ())))


def name_of(rank: int | str) -> str:
    """The file of a rank."""
    return f"state-rank-{rank}.safetensors"
