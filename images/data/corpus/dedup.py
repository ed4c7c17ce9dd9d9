"""Phase 6, dedup: of records that say the same, one stays.

Exact duplicates (after normalisation) go first, then near duplicates among those that are left. The one that stays is
that of the highest quality where the line has a model for it, else the oldest; where no time tells, the one with the
lowest id (`keeping`).

Near ones are found in four steps over the store: `sign` leaves the signatures of every shard, `match` the pairs that
some bands propose and the texts confirm; here they are connected, and of each cluster all but one are taken out. What
is held of all records at once is some hundred bytes each.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from corpus import grams, keeping, lsh, match, record, removed, rows, said, sign
from corpus.keeping import first_of_each
from corpus.lsh import Pairs
from corpus.removed import Removals
from corpus.rows import ROWS
from corpus.settings import DedupSettings
from corpus.task import REMOVED, Facts, Task

Index = NDArray[np.int64]
Keys = NDArray[np.uint64]
Similarity = Callable[[Index, Index], NDArray[np.float64]]
"""Tells of pairs of rows how similar they are."""


def run(task: Task) -> Facts:
    """Remove duplicates and write down of whom."""
    settings: DedupSettings = task.settings
    shards = task.shards["records"]
    table = rows.collect(shards)
    task.progress(table.num_rows // 3, table.num_rows)
    keys = np.concatenate([said.keys(shard, "said") for shard in shards])
    places = table.select(["shard", "row"])

    def similarity(left: Index, right: Index) -> NDArray[np.float64]:
        some, ends = np.unique(np.stack([left, right]), return_inverse=True)
        here = rows.by_shard(places.take(pa.array(some)), len(shards))
        form = said.forms(task.inputs["records"], "said")
        sizes = sign.stored(task.shards["signatures"], here, "said").sizes
        texts = said.Chosen(shards, here, form, "said")
        sets = grams.sets_of(lsh.whole(texts), np.arange(len(some)), sizes, settings.dedup.ngram)
        return sets.similarity(*ends.reshape(2, -1))

    pairs = match.stored(task.shards["pairs"])
    removals = duplicates(keys, keeping.rank_of(table), pairs, similarity)
    kept = removed.take_out(table, removals, task.folder / REMOVED)
    record.write(task.folder / ROWS, kept)
    gone, stays = (table.column("label").take(pa.array(side, pa.int64())) for side in (removals.row, removals.kept))
    return {
        "records_in": table.num_rows,
        "records_out": kept.num_rows,
        "quarantined": 0,
        "removed": removed.counted(removals),
        "conflicting": sum(a != b for a, b in zip(gone.to_pylist(), stays.to_pylist(), strict=True)),
    }


def duplicates(keys: Keys, rank: Index, pairs: Pairs, similarity: Similarity) -> Removals:
    """Which rows go, each with the one that stays.

    Args:
        keys: of shape (rows, 2); equal where the texts are exact duplicates.
        rank: all numbers; of duplicates the row of the lowest one stays.
        pairs: near rows among those that stay of exact duplicates.
        similarity: asked of the pairs that are connected by others only.
    """
    keeper = first_of_each(keys, rank)
    left = np.flatnonzero(keeper == np.arange(len(keeper)))
    root = lsh.connected(len(keys), pairs.left, pairs.right)[left]
    best = left[first_of_each(root[:, None].astype(np.uint64), rank[left])]
    near = best != left
    stays = np.arange(len(keeper))
    stays[left] = best
    exact = np.flatnonzero(keeper != np.arange(len(keeper)))
    how_near = _similarities(left[near], best[near], pairs, similarity)
    removals = Removals.of(exact, stays[keeper[exact]], "exact", np.ones(len(exact)))
    return removals + Removals.of(left[near], best[near], "near", how_near)


def _similarities(one: Index, other: Index, pairs: Pairs, similarity: Similarity) -> NDArray[np.float64]:
    """Of those that were compared, what came of it; the others are compared now."""
    known, wanted = (_numbered(*ends) for ends in ((pairs.left, pairs.right), (one, other)))
    order = np.argsort(known)
    at = np.searchsorted(known[order], wanted).clip(max=max(0, len(known) - 1))
    found = np.zeros(len(wanted), np.float64)
    compared = np.isin(wanted, known)
    found[compared] = pairs.similarity[order[at[compared]]]
    found[~compared] = similarity(one[~compared], other[~compared])
    return found


def _numbered(one: Index, other: Index) -> Index:
    """A number for every pair of rows, whichever comes first."""
    numbers: Index = np.minimum(one, other) << 32 | np.maximum(one, other)
    return numbers
