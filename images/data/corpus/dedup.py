"""Phase 5, dedup: of records that say the same, one stays.

Exact duplicates (after normalisation) go first, then near duplicates among those that are left. The one that stays is
that of the highest quality where the line has a model for it, else the oldest; where no time tells, the one with the
lowest id, which follows from content: the order of the deliveries decides nothing.

Near ones are found in four steps over the store: the signatures that `sign` left of every shard; band by band the rows
that share a key; of those alone the texts, a shard at a time, to verify each pair and connect what is near; and the
filter. What is held of all records at once is some hundred bytes each, and the keys of a few bands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from corpus import lsh, record, removed, rows, said, sign
from corpus.minhash import Signed
from corpus.removed import Removals
from corpus.rows import ROWS
from corpus.settings import DedupSettings
from corpus.shingles import Texts
from corpus.task import REMOVED, Facts, Task
from refit.spec import Dedup

Index = NDArray[np.int64]
Keys = NDArray[np.uint64]


def run(task: Task) -> Facts:
    """Remove duplicates and write down of whom."""
    settings: DedupSettings = task.settings
    shards = task.shards["records"]
    table = rows.collect(shards)
    task.progress(table.num_rows // 3, table.num_rows)
    keys = np.concatenate([said.keys(shard, "said") for shard in shards])
    form, places = said.forms(task.inputs["records"], "said"), table.select(["shard", "row"])

    def by_shard(some: Index) -> list[Index]:
        return rows.by_shard(places.take(pa.array(some)), len(shards))

    def signed(some: Index) -> Signed:
        return sign.stored(task.shards["signatures"], by_shard(some))

    def texts(some: Index) -> said.Chosen:
        return said.Chosen(shards, by_shard(some), form, "said")

    removals, found = duplicates(keys, rank_of(table), signed, texts, settings.dedup)
    kept = removed.take_out(table, removals, task.folder / REMOVED)
    record.write(task.folder / ROWS, kept)
    gone, stays = (table.column("label").take(pa.array(side, pa.int64())) for side in (removals.row, removals.kept))
    return {
        "records_in": table.num_rows,
        "records_out": kept.num_rows,
        "quarantined": 0,
        "removed": removed.counted(removals),
        "conflicting": sum(a != b for a, b in zip(gone.to_pylist(), stays.to_pylist(), strict=True)),
        "candidate_pairs": found.candidate_pairs,
        "verified_pairs": found.verified_pairs,
    }


def rank_of(table: pa.Table) -> Index:
    """Of every row its place in the order of keeping: the best, the oldest, the lowest id, then as they come."""
    keys = [("quality", "descending", "at_end"), ("time", "ascending", "at_end"), ("id", "ascending", "at_end")]
    order = pc.sort_indices(table, sort_keys=keys).to_numpy()
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return rank


def duplicates(
    keys: Keys, rank: Index, signed: Callable[[Index], Signed], texts: Callable[[Index], Iterable[Texts]],
    settings: Dedup,
) -> tuple[Removals, lsh.Clusters]:  # fmt: skip
    """Which rows go, each with the one that stays.

    Args:
        keys: of shape (rows, 2); equal where the texts are exact duplicates.
        rank: all numbers; of duplicates the row of the lowest one stays.
        signed: gives the signatures of some rows.
        texts: gives the texts of some rows as they are compared, in parts, in the rows' order.
        settings: the threshold and how candidates are found.
    """
    keeper = first_of_each(keys, rank)
    left = np.flatnonzero(keeper == np.arange(len(keeper)))
    found = lsh.clusters_of(signed(left), lambda shared: texts(left[shared]), settings)
    best = first_of_each(found.root[:, None].astype(np.uint64), rank[left])
    near = np.flatnonzero(best != np.arange(len(left)))
    stays = np.arange(len(keeper))
    stays[left] = left[best]
    exact = np.flatnonzero(keeper != np.arange(len(keeper)))
    removals = Removals.of(exact, stays[keeper[exact]], "exact", np.ones(len(exact)))
    return removals + Removals.of(left[near], left[best[near]], "near", found.sets.similarity(near, best[near])), found


def first_of_each(keys: Keys, rank: Index) -> Index:
    """For each row the one of the lowest rank that has the same key; `keys` has shape (rows, any)."""
    order = np.lexsort((rank, *keys.T))
    changed = np.any(keys[order[1:]] != keys[order[:-1]], axis=1)
    starts = np.flatnonzero(np.concatenate([[True], changed])[: len(order)])
    first = np.empty(len(keys), np.int64)
    first[order] = np.repeat(order[starts], np.diff(np.append(starts, len(order))))
    return first
