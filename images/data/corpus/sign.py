"""Phase 4, sign: the band keys of every record of a shard, in the store, for dedup to find near duplicates by.

    keys.npy    (bands, records) of uint64: two texts may be near where they have one key in a band (`corpus.minhash`)
    sizes.npy   (records,) of int64: how many n-grams each text has

A text is signed without its source's form, so the form is an input of every shard: as long as it stays as it is, a
delivery more costs its own signatures and none of those that are there.

What it does not do: decide what is near (dedup's threshold does), or leave out exact duplicates, which are everybody's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from corpus import minhash, said
from corpus.minhash import Signed
from corpus.quarantine import Quarantine
from corpus.settings import SignSettings
from corpus.shingles import Hashes
from corpus.task import QUARANTINE, TEXTS, Facts, Task

Index = NDArray[np.int64]

KEYS, SIZES = "keys.npy", "sizes.npy"


def run(task: Task) -> Facts:
    """Sign a shard."""
    settings: SignSettings = task.settings
    shard, form = task.inputs["records"], said.read_form(task.inputs["form"])
    count = pq.read_metadata(shard / TEXTS).num_rows
    texts = said.Chosen([shard], [np.arange(count)], [form], "said")
    signed = minhash.signed(texts, **settings.model_dump())
    keys = [signed.band(number) for number in range(signed.bands)]
    np.save(task.folder / KEYS, np.stack(keys), allow_pickle=False)
    np.save(task.folder / SIZES, signed.sizes, allow_pickle=False)
    with Quarantine(task.folder / QUARANTINE):
        pass  # every phase in shards has one; there is nothing that could not be signed
    return {"records_in": count, "records_out": count, "quarantined": 0}


def stored(shards: Sequence[Path], rows: Sequence[Index]) -> Signed:
    """The signatures of some rows, numbered on through all shards; their keys are read when a band is asked for.

    Args:
        shards: folders that `run` wrote.
        rows: of each shard the numbers of the rows that count, rising.
    """

    def band(number: int) -> Hashes:
        # Mapped for this band alone: of keys that stay mapped all the pages would count as ours.
        parts = (np.load(shard / KEYS, mmap_mode="r", allow_pickle=False)[number] for shard in shards)
        return np.concatenate([part[own] for part, own in zip(parts, rows, strict=True)])

    sizes = [np.load(shard / SIZES, allow_pickle=False)[own] for shard, own in zip(shards, rows, strict=True)]
    bands = len(np.load(shards[0] / KEYS, mmap_mode="r", allow_pickle=False))
    return Signed(bands, np.concatenate(sizes), band)
