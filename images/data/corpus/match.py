"""Phase 5, match: near pairs among all records, found by some of the bands.

    pairs.npy         (2, pairs) of int64: the lower and the higher row, numbered on through all shards
    similarity.npy    (pairs,) of float64

The bands are dealt out to a few parts, each of which any machine can do: it reads the keys of its bands, of all shards,
and the texts of those alone that share one. What all parts' pairs connect is what is near; dedup connects them. Of
records that say exactly the same only the one that will stay is looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from corpus import lsh, rows, said, sign
from corpus.keeping import first_of_each, rank_of
from corpus.lsh import Pairs
from corpus.quarantine import Quarantine
from corpus.settings import MATCH_PARTS, MatchSettings
from corpus.task import QUARANTINE, Facts, Task
from refit.spec import Dedup

Index = NDArray[np.int64]

PAIRS, SIMILARITY = "pairs.npy", "similarity.npy"


def run(task: Task) -> Facts:
    """Find the pairs of one part."""
    settings: MatchSettings = task.settings
    shards, signatures = (_folders(task, role) for role in ("records", "signatures"))
    left, starts = keepers(shards)
    form = said.forms(task.inputs["clean"], "said")

    def texts(some: Index) -> said.Chosen:
        return said.Chosen(shards, by_shard(left[some], starts), form, "said")

    found = Pairs.none()
    if bands := bands_of(settings.part, settings.dedup):
        signed = sign.stored(signatures, by_shard(left, starts), "said", bands)
        found = lsh.near_pairs(signed, texts, settings.dedup)
    np.save(task.folder / PAIRS, left[np.stack([found.left, found.right])], allow_pickle=False)
    np.save(task.folder / SIMILARITY, found.similarity, allow_pickle=False)
    with Quarantine(task.folder / QUARANTINE):
        pass  # every phase in shards has one; there is nothing that could not be compared
    seen = 0 if settings.part else int(starts[-1])  # by every part; they are added up
    told = {"records_in": seen, "records_out": seen, "quarantined": 0}
    return {**told, "candidate_pairs": found.candidates, "verified_pairs": len(found.left)}


def bands_of(part: int, settings: Dedup) -> range:
    """The bands of a part; none where there are fewer bands than parts."""
    return range(settings.bands)[part::MATCH_PARTS]


def keepers(shards: Sequence[Path]) -> tuple[Index, Index]:
    """The rows that stay of exact duplicates, numbered on through all shards; and the number of each shard's first."""
    parts = [said.keys(shard, "said") for shard in shards]
    starts, keys = np.cumsum([0, *map(len, parts)]), np.concatenate(parts)
    first = first_of_each(keys, np.arange(len(keys)))
    repeated = np.flatnonzero(np.bincount(first, minlength=len(first))[first] > 1)
    # Few rows have a duplicate: of those alone it is asked which one stays.
    rank = rank_of(rows.columns(shards, by_shard(repeated, starts)))
    first[repeated] = repeated[first_of_each(keys[repeated], rank)]
    return np.flatnonzero(first == np.arange(len(first))), starts


def stored(parts: Sequence[Path]) -> Pairs:
    """The pairs of all parts."""
    ends = [np.load(part / PAIRS, allow_pickle=False) for part in parts]
    similarity = [np.load(part / SIMILARITY, allow_pickle=False) for part in parts]
    left, right = np.concatenate(ends, axis=1)
    return Pairs(left, right, np.concatenate(similarity), 0)


def by_shard(rows: Index, starts: Index) -> list[Index]:
    """Rows that are numbered on through all shards, rising, as numbers in each; `starts` has each one's first."""
    edges = np.searchsorted(rows, starts)
    return [rows[a:b] - start for a, b, start in zip(edges, edges[1:], starts, strict=False)]


def _folders(task: Task, role: str) -> list[Path]:
    return [task.inputs[name] for name in sorted(task.inputs) if name.startswith(f"{role}/")]
