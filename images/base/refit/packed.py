"""The packed format: what the data stage writes and training maps into memory.

A split is three files beside each other, all little-endian, of N packs of `length` tokens each:

    <split>.json        {"version", "packs", "length", "dtype", "vocabulary": sha256, "tokens", "targets", "samples"}
    <split>.tokens.bin  N x length   uint16 or uint32: token ids, padded with the pad id
    <split>.segments.bin N x length  uint16: which document of the pack a token is of, from 1; 0 is padding
    <split>.mask.bin    N x length   uint8: the token's weight in the loss in 255ths; 0 where it is no target

Position ids follow from the segments: they start at 0 in each document. A token is predicted from the tokens of its
own document only, and the first token of a document is never a target.

Of preference pairs, segments 2 n - 1 and 2 n of a pack are the two sides of one pair: what is asked with the chosen
answer, and with the rejected one. Such a split is of version 3 and its header has `pairs`; who reads it must ask for
it.
"""

from __future__ import annotations

import json
import mmap
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refit import files
from refit.errors import BadInput

VERSION, OF_PAIRS = 2, 3
WHOLE = 255
"""The mask of a target that counts whole."""
COUNTED = 1 << 22  # tokens looked at in one go


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a split holds. `tokens` and `targets` (whatever they weigh) count without padding, `samples` documents.

    `pairs` is how many pairs of documents there are, None where documents stand for themselves.
    """

    version: int
    packs: int
    length: int
    dtype: str
    vocabulary: str
    tokens: int
    targets: int
    samples: int
    pairs: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """As it is written: of documents that stand for themselves nothing is said of pairs."""
        return {name: value for name, value in asdict(self).items() if name != "pairs" or value is not None}


@dataclass(frozen=True)
class Packed:
    """A split mapped into memory: three arrays of shape (packs, length)."""

    header: Header
    tokens: NDArray[np.unsignedinteger]
    segments: NDArray[np.uint16]
    mask: NDArray[np.uint8]

    def plain(self) -> Packed:
        """The same maps as plain arrays: what is taken from numpy's own class of them is slower to compute with."""
        return Packed(self.header, *map(np.asarray, (self.tokens, self.segments, self.mask)))


@dataclass(frozen=True)
class Draft:
    """A split in the making: three writable maps of shape (packs, length), all zero; `finish` when they are full."""

    tokens: NDArray[np.unsignedinteger]
    segments: NDArray[np.uint16]
    mask: NDArray[np.uint8]
    _path: Path
    _vocabulary: str
    _pairs: bool = False

    def finish(self, samples: int) -> Header:
        """Count what was filled in and write the header, without which the split does not exist."""
        packs, length = self.tokens.shape
        rows = max(1, COUNTED // length)
        tokens = targets = 0
        for at in range(0, packs, rows):
            tokens += int(np.count_nonzero(self.segments[at : at + rows]))
            targets += int(np.count_nonzero(self.mask[at : at + rows]))
            let_go(self.segments, self.mask)
        header = Header(
            version=OF_PAIRS if self._pairs else VERSION, packs=packs, length=length, dtype=self.tokens.dtype.name,
            vocabulary=self._vocabulary, tokens=tokens, targets=targets, samples=samples,
            pairs=samples // 2 if self._pairs else None,
        )  # fmt: skip
        for array in (self.tokens, self.segments, self.mask):
            if isinstance(array, np.memmap):
                array.flush()
        files.write(self._path, json.dumps(header.as_dict(), indent=1).encode())
        return header


def create(
    folder: Path, split: str, packs: int, length: int, *, vocabulary: str, vocabulary_size: int, pairs: bool = False
) -> Draft:  # fmt: skip
    """Files of a split's full size, mapped for writing: what is filled in need not fit into memory.

    Raises:
        OSError: the disk has no room for it.
    """
    path = folder / f"{split}.json"
    path.unlink(missing_ok=True)
    dtype = "<u2" if vocabulary_size <= 1 << 16 else "<u4"
    shape = (packs, length)
    return Draft(
        _new(folder / f"{split}.tokens.bin", dtype, shape), _new(folder / f"{split}.segments.bin", "<u2", shape),
        _new(folder / f"{split}.mask.bin", "u1", shape), path, vocabulary, pairs,
    )  # fmt: skip


def write(
    folder: Path, split: str, *, tokens: NDArray[np.integer], segments: NDArray[np.integer], mask: NDArray[np.integer],
    vocabulary: str, vocabulary_size: int, samples: int, pairs: bool = False,
) -> Header:  # fmt: skip
    """Write a split; the arrays have shape (packs, length). Returns its header."""
    if not (tokens.shape == segments.shape == mask.shape and tokens.ndim == 2):
        raise ValueError(f"shapes differ: tokens {tokens.shape}, segments {segments.shape}, mask {mask.shape}")
    packs, length = tokens.shape
    draft = create(folder, split, packs, length, vocabulary=vocabulary, vocabulary_size=vocabulary_size, pairs=pairs)
    draft.tokens[:], draft.segments[:], draft.mask[:] = tokens, segments, mask
    return draft.finish(samples)


def read(folder: Path, split: str, *, pairs: bool = False) -> Packed:
    """Map a split into memory; one of preference pairs only where they are asked for.

    Raises:
        BadInput: it is not there, of another version, holds pairs where none are asked for (or none where they are),
            or its files have not the size that the header says.
    """
    path = folder / f"{split}.json"
    try:
        header = Header(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise BadInput(f"{path}: not a packed split: {error}. Prepare the data again.") from error
    if header.version not in (VERSION, OF_PAIRS):
        raise BadInput(
            f"{path}: packed format {header.version}, this code reads {VERSION} and {OF_PAIRS}. Prepare the data again."
        )
    if (header.version == OF_PAIRS) != pairs or (header.pairs is not None) != pairs:
        found, wanted = ("preference pairs", "documents") if not pairs else ("documents", "preference pairs")
        raise BadInput(
            f"{path}: holds {found}, {wanted} are wanted. Prepare the data again for the train.objective that is "
            "trained (dpo and orpo want pairs)."
        )
    shape = (header.packs, header.length)
    return Packed(
        header,
        _map(folder / f"{split}.tokens.bin", np.dtype(header.dtype), shape),
        _map(folder / f"{split}.segments.bin", np.dtype("<u2"), shape),
        _map(folder / f"{split}.mask.bin", np.dtype("u1"), shape),
    )


def mask_of(weights: NDArray[np.floating]) -> NDArray[np.uint8]:
    """Weights from 0 to 1 in 255ths. One above 0 stays above 0: what is little learnt is learnt."""
    mask: NDArray[np.uint8] = np.where(weights > 0, np.maximum(1, np.rint(weights * WHOLE)), 0).astype(np.uint8)
    return mask


def let_go(*arrays: NDArray[Any]) -> None:
    """Take mapped arrays out of this process's memory: what was written stays, what is touched again comes back.

    Pages of a map count as ours for as long as they are in memory, and in one that is gone through at random soon all
    of them are.
    """
    for array in arrays:
        if isinstance(array.base, mmap.mmap):
            array.base.madvise(mmap.MADV_DONTNEED)


def position_ids(segments: NDArray[np.integer]) -> NDArray[np.int64]:
    """Positions that start at 0 in each document, for segments of shape (packs, length)."""
    index = np.broadcast_to(np.arange(segments.shape[1]), segments.shape)
    starts = np.ones(segments.shape, dtype=bool)
    starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
    positions: NDArray[np.int64] = index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)
    return positions


def _map(path: Path, dtype: np.dtype[np.generic], shape: tuple[int, int]) -> Any:
    expected = shape[0] * shape[1] * dtype.itemsize
    size = path.stat().st_size if path.is_file() else -1
    if size != expected:
        raise BadInput(f"{path}: {size} bytes, the header says {expected}. Prepare the data again.")
    if expected == 0:
        return np.zeros(shape, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r", shape=shape)


def _new(path: Path, dtype: str, shape: tuple[int, int]) -> Any:
    size = shape[0] * shape[1] * np.dtype(dtype).itemsize
    with path.open("wb") as handle:
        if size:  # reserved: a full disk is an error here, and would be a SIGBUS at some write into the map
            os.posix_fallocate(handle.fileno(), 0, size)
    return np.memmap(path, dtype, mode="r+", shape=shape) if size else np.zeros(shape, dtype)
