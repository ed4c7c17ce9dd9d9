"""What was removed, and for whom: records that are not bad, but of which another one stays."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from corpus.record import write

Index = NDArray[np.int64]


@dataclass(frozen=True)
class Removals:
    """Row `row[i]` of a table goes because row `kept[i]` stays; `how` is exact or near."""

    row: Index
    kept: Index
    how: tuple[str, ...]
    similarity: NDArray[np.float64]

    @classmethod
    def of(cls, row: Index, kept: Index, how: str, similarity: NDArray[np.float64]) -> Removals:
        """Removals of one kind."""
        return cls(row, kept, (how,) * len(row), similarity)

    def __len__(self) -> int:
        return len(self.row)

    def __add__(self, more: Removals) -> Removals:
        """Both, by the row that goes."""
        row = np.concatenate([self.row, more.row])
        order = np.argsort(row, kind="stable")
        how = (*self.how, *more.how)
        return Removals(
            row[order], np.concatenate([self.kept, more.kept])[order], tuple(how[i] for i in order.tolist()),
            np.concatenate([self.similarity, more.similarity])[order],
        )  # fmt: skip


SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("source", pa.string()),
        ("file", pa.string()),
        ("line", pa.int64()),
        ("kept", pa.string()),
        ("how", pa.string()),
        ("similarity", pa.float64()),
    ]
)


def take_out(table: pa.Table, gone: Removals, path: Path, *, besides: Index | None = None) -> pa.Table:
    """Write the removals down; returns the table without them, and without the rows `besides`."""
    listed = table.select(["id", "source", "file", "line"]).take(pa.array(gone.row))
    listed = listed.append_column("kept", table.column("id").take(pa.array(gone.kept)))
    listed = listed.append_column("how", pa.array(gone.how, pa.string()))
    listed = listed.append_column("similarity", pa.array(gone.similarity))
    write(path, listed.cast(SCHEMA))
    stays = np.ones(table.num_rows, bool)
    stays[gone.row] = False
    if besides is not None:
        stays[besides] = False
    return table.filter(pa.array(stays)).combine_chunks()


def counted(gone: Removals) -> dict[str, int]:
    """How many went for which reason."""
    return {"exact": 0, "near": 0} | Counter(gone.how)
