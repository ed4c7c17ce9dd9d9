"""Which of several rows stays: the best, the oldest, the one with the lowest id, which follows from content.

So the order of the deliveries decides nothing.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Index = NDArray[np.int64]
Keys = NDArray[np.uint64]

COLUMNS = ("quality", "time", "id")


def rank_of(table: pa.Table) -> Index:
    """Of every row its place in the order of keeping: the best, the oldest, the lowest id, then as they come."""
    keys = [("quality", "descending", "at_end"), ("time", "ascending", "at_end"), ("id", "ascending", "at_end")]
    order = pc.sort_indices(table, sort_keys=keys).to_numpy()
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return rank


def first_of_each(keys: Keys, rank: Index) -> Index:
    """For each row the one of the lowest rank that has the same key; `keys` has shape (rows, any)."""
    order = np.lexsort((rank, *keys.T))
    changed = np.any(keys[order[1:]] != keys[order[:-1]], axis=1)
    starts = np.flatnonzero(np.concatenate([[True], changed])[: len(order)])
    first = np.empty(len(keys), np.int64)
    first[order] = np.repeat(order[starts], np.diff(np.append(starts, len(order))))
    return first
