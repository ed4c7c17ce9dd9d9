"""The packed format: what the data stage writes and training maps into memory.

A split is three files beside each other, all little-endian, of N packs of `length` tokens each:

    <split>.json        {"version", "packs", "length", "dtype", "vocabulary": sha256, "tokens", "targets", "samples"}
    <split>.tokens.bin  N x length   uint16 or uint32: token ids, padded with the pad id
    <split>.segments.bin N x length  uint16: which document of the pack a token is of, from 1; 0 is padding
    <split>.mask.bin    N x length   uint8: 1 where the token is a target of the loss

Position ids follow from the segments: they start at 0 in each document. A token is predicted from the tokens of its
own document only, and the first token of a document is never a target.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refit.errors import BadInput

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a split holds. `tokens` and `targets` count without padding; `samples` counts documents."""

    version: int
    packs: int
    length: int
    dtype: str
    vocabulary: str
    tokens: int
    targets: int
    samples: int


@dataclass(frozen=True)
class Packed:
    """A split mapped into memory: three arrays of shape (packs, length)."""

    header: Header
    tokens: NDArray[np.unsignedinteger]
    segments: NDArray[np.uint16]
    mask: NDArray[np.uint8]


def write(
    folder: Path, split: str, *, tokens: NDArray[np.integer], segments: NDArray[np.integer], mask: NDArray[np.integer],
    vocabulary: str, vocabulary_size: int, samples: int,
) -> Header:  # fmt: skip
    """Write a split; the arrays have shape (packs, length). Returns its header."""
    if not (tokens.shape == segments.shape == mask.shape and tokens.ndim == 2):
        raise ValueError(f"shapes differ: tokens {tokens.shape}, segments {segments.shape}, mask {mask.shape}")
    dtype = "uint16" if vocabulary_size <= 1 << 16 else "uint32"
    header = Header(
        version=VERSION, packs=tokens.shape[0], length=tokens.shape[1], dtype=dtype, vocabulary=vocabulary,
        tokens=int((segments > 0).sum()), targets=int(mask.sum()), samples=samples,
    )  # fmt: skip
    (folder / f"{split}.tokens.bin").write_bytes(
        np.ascontiguousarray(tokens, dtype=f"<{np.dtype(dtype).str[1:]}").tobytes()
    )
    (folder / f"{split}.segments.bin").write_bytes(np.ascontiguousarray(segments, dtype="<u2").tobytes())
    (folder / f"{split}.mask.bin").write_bytes(np.ascontiguousarray(mask, dtype="u1").tobytes())
    (folder / f"{split}.json").write_text(json.dumps(asdict(header), indent=1), encoding="utf-8")
    return header


def read(folder: Path, split: str) -> Packed:
    """Map a split into memory.

    Raises:
        BadInput: it is not there, of another version, or its files have not the size that the header says.
    """
    path = folder / f"{split}.json"
    try:
        header = Header(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise BadInput(f"{path}: not a packed split: {error}. Prepare the data again.") from error
    if header.version != VERSION:
        raise BadInput(f"{path}: packed format {header.version}, this code reads {VERSION}. Prepare the data again.")
    shape = (header.packs, header.length)
    return Packed(
        header,
        _map(folder / f"{split}.tokens.bin", np.dtype(header.dtype), shape),
        _map(folder / f"{split}.segments.bin", np.dtype("<u2"), shape),
        _map(folder / f"{split}.mask.bin", np.dtype("u1"), shape),
    )


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
