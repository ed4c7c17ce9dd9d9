"""Phase 4, sign: the band keys of every record of a shard, in the store, for near duplicates to be found by.

    said-keys.npy     (bands, records) of uint64: two texts may be near where they have one key in a band
                      (`corpus.minhash`); of everything that was said, for match
    said-sizes.npy    (records,) of int64: how many n-grams each text has
    asked-*.npy       the same of what is asked, for split

A text is signed without its source's form, so the forms are inputs of every shard: as long as they stay as they are, a
delivery more costs its own signatures and none of those that are there.

What it does not do: decide what is near (dedup's threshold does), or leave out exact duplicates, which are everybody's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from corpus import minhash, said
from corpus.minhash import Signed
from corpus.quarantine import Quarantine
from corpus.settings import SignSettings
from corpus.shingles import Hashes
from corpus.task import QUARANTINE, TEXTS, Facts, Kind, Task

Index = NDArray[np.int64]


def run(task: Task) -> Facts:
    """Sign a shard."""
    settings: SignSettings = task.settings
    shard = task.inputs["records"]
    count = pq.read_metadata(shard / TEXTS).num_rows
    for kind in get_args(Kind):
        form = said.read_form(task.inputs[f"{kind}_form"])
        texts = said.Chosen([shard], [np.arange(count)], [form], kind)
        write(task.folder, kind, minhash.signed(texts, **settings.model_dump()))
    with Quarantine(task.folder / QUARANTINE):
        pass  # every phase in shards has one; there is nothing that could not be signed
    return {"records_in": count, "records_out": count, "quarantined": 0}


def write(folder: Path, kind: Kind, signed: Signed) -> None:
    """Write the signatures of a shard's texts of a kind."""
    keys = [signed.band(number) for number in range(signed.bands)]
    np.save(_keys(folder, kind), np.stack(keys), allow_pickle=False)
    np.save(_sizes(folder, kind), signed.sizes, allow_pickle=False)


def stored(shards: Sequence[Path], rows: Sequence[Index], kind: Kind, bands: range | None = None) -> Signed:
    """The signatures of some rows, numbered on through all shards; their keys are read when a band is asked for.

    Args:
        shards: folders that `run` wrote.
        rows: of each shard the numbers of the rows that count, rising.
        kind: which of a record's texts.
        bands: those that are wanted, of all if not said.
    """
    own = bands or range(len(np.load(_keys(shards[0], kind), mmap_mode="r", allow_pickle=False)))

    def band(number: int) -> Hashes:
        # Mapped for this band alone: of keys that stay mapped all the pages would count as ours.
        keys = (np.load(_keys(shard, kind), mmap_mode="r", allow_pickle=False)[own[number]] for shard in shards)
        return np.concatenate([part[wanted] for part, wanted in zip(keys, rows, strict=True)])

    sizes = (np.load(_sizes(shard, kind), allow_pickle=False) for shard in shards)
    chosen = [part[wanted] for part, wanted in zip(sizes, rows, strict=True)]
    return Signed(len(own), np.concatenate(chosen), band)


def _keys(folder: Path, kind: Kind) -> Path:
    return folder / f"{kind}-keys.npy"


def _sizes(folder: Path, kind: Kind) -> Path:
    return folder / f"{kind}-sizes.npy"
