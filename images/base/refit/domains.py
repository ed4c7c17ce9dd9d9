"""Which domain each document of a packed split is of: three files beside the split's own, all little-endian.

    <split>.domains.json   the names of the domains
    <split>.domains.bin    uint16 a document (or piece of one), pack by pack: the number of its domain
    <split>.pieces.bin     uint64, packs + 1: which document is the first of each pack, and how many there are in all

A split may be without them: then nothing is known of its domains.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from refit import files
from refit.errors import BadInput

Index = NDArray[np.int64]


@dataclass(frozen=True)
class Domains:
    """The domains of a split. `own` has one of each document, `first` (packs + 1,) the first document of each pack."""

    names: tuple[str, ...]
    own: NDArray[np.uint16]
    first: NDArray[np.uint64]

    def of(self, packs: Index, segments: NDArray[np.integer]) -> Index:
        """The domain of every token of some packs, of the shape of their `segments`; -1 where there is padding."""
        document = self.first[packs].astype(np.int64)[:, None] + segments.astype(np.int64) - 1
        found: Index = np.where(segments > 0, self.own[np.maximum(document, 0)].astype(np.int64), -1)
        return found


def write(folder: Path, split: str, domains: Sequence[str], packs: Index, count: int) -> None:
    """Write the domains of documents that lie pack by pack; `packs` has the pack of each, of `count`."""
    names = sorted(set(domains))
    if len(names) > 1 << 16:
        raise BadInput(f"{len(names)} domains, 65,536 at most. Name sources' domains more broadly (data.sources).")
    number = {name: place for place, name in enumerate(names)}
    own = np.fromiter((number[name] for name in domains), "<u2", len(domains))
    (folder / f"{split}.domains.bin").write_bytes(own.tobytes())
    first = np.searchsorted(packs, np.arange(count + 1)).astype("<u8")
    (folder / f"{split}.pieces.bin").write_bytes(first.tobytes())
    files.write(folder / f"{split}.domains.json", json.dumps(names, ensure_ascii=False).encode())


def read(folder: Path, split: str) -> Domains | None:
    """The domains of a split; None where it says nothing of them.

    Raises:
        BadInput: the files do not fit together.
    """
    names = folder / f"{split}.domains.json"
    if not names.is_file():
        return None
    own = np.fromfile(folder / f"{split}.domains.bin", "<u2")
    first = np.fromfile(folder / f"{split}.pieces.bin", "<u8")
    known = tuple(json.loads(names.read_bytes()))
    if not len(first) or first[-1] != len(own) or own.max(initial=0) >= max(1, len(known)):
        raise BadInput(f"{names}: domains of {len(own)} documents do not fit their packs. Prepare the data again.")
    return Domains(known, own, first)
