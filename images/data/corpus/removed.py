"""What was removed, and for whom: records that are not bad, but of which another one stays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from corpus.record import write

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


class Removal(NamedTuple):
    """Row `row` of a table goes because row `kept` stays; `how` is exact or near."""

    row: int
    kept: int
    how: str
    similarity: float


def take_out(
    table: pa.Table, removals: list[Removal], path: Path, *, besides: AbstractSet[int] = frozenset()
) -> pa.Table:
    """Write the removals down; returns the table without them, and without the rows `besides`."""
    gone = sorted(removals)
    rows = pa.array([removal.row for removal in gone], pa.int64())
    kept = pa.array([removal.kept for removal in gone], pa.int64())
    listed = table.select(["id", "source", "file", "line"]).take(rows)
    listed = listed.append_column("kept", table.column("id").take(kept))
    listed = listed.append_column("how", pa.array([removal.how for removal in gone], pa.string()))
    listed = listed.append_column("similarity", pa.array([removal.similarity for removal in gone], pa.float64()))
    write(path, listed.cast(SCHEMA))
    out = {removal.row for removal in gone} | besides
    return table.take(pa.array([row for row in range(table.num_rows) if row not in out], pa.int64()))


def counted(removals: list[Removal]) -> dict[str, int]:
    """How many went for which reason."""
    return {"exact": 0, "near": 0} | Counter(removal.how for removal in removals)
