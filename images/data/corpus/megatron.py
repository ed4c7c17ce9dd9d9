"""Flat documents for Megatron: its indexed dataset, `PREFIX.bin` and `PREFIX.idx`.

The index, little-endian (Megatron-LM, megatron/core/datasets/indexed_dataset.py, `_IndexWriter`):

    9 bytes        "MMIDIDX" and two zeros
    uint64         version, 1
    uint8          code of the tokens' type: 4 is int32, 8 is uint16
    uint64         sequences
    uint64         documents + 1
    int32          length of each sequence, in tokens
    int64          where each sequence begins, in bytes
    int64          the sequence at which each document begins, and the number of sequences

A document is one sequence here. Documents that were refused are none. Megatron knows no uint32; ids of that width go
as int32, which they fit (the same four bytes). Megatron has no mask either: it stays in the flat set, and with it what
a token weighs.
"""

from __future__ import annotations

import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corpus import flat
from refit import files, log
from refit.errors import BadInput
from refit.packed import COUNTED, WHOLE

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
_CODES = {"uint16": 8, "uint32": 4}
_LONGEST = (1 << 31) - 1


def export(folder: Path, name: str, prefix: Path) -> dict[str, Any]:
    """Write `prefix`.bin and `prefix`.idx, the index last; returns counts.

    Raises:
        BadInput: the set cannot be read, holds no document, or has what Megatron's int32 cannot hold.
    """
    found = flat.read(folder, name)
    lengths = found.lengths()
    lengths = lengths[lengths > 0]
    where = folder / f"{name}.json"
    if found.halves is not None:
        raise BadInput(
            f"{where}: holds preference pairs; Megatron's format knows documents only. Export answers instead."
        )
    if not len(lengths):
        raise BadInput(f"{where}: holds no document; Megatron cannot open an empty file.")
    if lengths.max() > _LONGEST or found.header.vocabulary_size > _LONGEST + 1:
        raise BadInput(
            f"{where}: a document of {lengths.max()} tokens, a vocabulary of {found.header.vocabulary_size}; "
            f"Megatron's int32 ends at {_LONGEST}."
        )
    data, index = (prefix.with_name(prefix.name + end) for end in (".bin", ".idx"))
    prefix.parent.mkdir(parents=True, exist_ok=True)
    index.unlink(missing_ok=True)
    with files.replacing(data) as draft:
        shutil.copyfile(folder / f"{name}.tokens.bin", draft)  # refused documents have no bytes in it
    with files.replacing(index) as draft, draft.open("wb") as handle:
        handle.writelines(index_parts(lengths, found.header.dtype))
    if weighed := _weighed(found.mask):
        log.event("weights_not_exported", tokens=weighed, why="Megatron has no mask: every token counts whole")
    return {
        "bin": str(data),
        "idx": str(index),
        "documents": len(lengths),
        "refused": len(found) - len(lengths),
        "tokens": found.header.tokens,
        "dtype": "uint16" if found.header.dtype == "uint16" else "int32",
    }


def _weighed(mask: NDArray[np.uint8]) -> int:
    """How many targets count less than whole."""
    parts = (mask[at : at + COUNTED] for at in range(0, len(mask), COUNTED))
    return sum(int(np.count_nonzero((part > 0) & (part < WHOLE))) for part in parts)


def index_parts(lengths: NDArray[np.int64], dtype: str) -> Iterator[bytes]:
    """The index of documents of these lengths, part by part.

    Pointers are computed in int64: in int32 they turn negative past 2 GiB (Megatron-LM#1519, #1672).
    """
    pointers = np.zeros(len(lengths), np.int64)
    np.cumsum(lengths[:-1] * np.dtype(dtype).itemsize, dtype=np.int64, out=pointers[1:])
    yield MAGIC + struct.pack("<QBQQ", VERSION, _CODES[dtype], len(lengths), len(lengths) + 1)
    yield lengths.astype("<i4").tobytes()
    yield pointers.astype("<i8").tobytes()
    yield np.arange(len(lengths) + 1, dtype="<i8").tobytes()
