"""Records without what they say: the columns that decide who stays, on which side, how often. Texts stay in the shards.

A row names its place: `shard` (its number among the shards of clean) and `row` (its number there).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from corpus import record
from corpus.record import Message
from corpus.task import RECORDS, TEXTS

ROWS = "rows.parquet"
# In the order of protection: what is near to a later side is removed from an earlier one.
SIDES = ("train", "validation", "heldout")
Index = NDArray[np.int64]

# Few different values, many rows: kept once each.
_NAMES = ["source", "file", "domain", "label"]
# All of a column's text stands in one array: of many records that is more than 32-bit offsets reach.
_LARGE = dict.fromkeys(("id", "session", "user", "time"), pa.large_string())
_OF_RECORDS = [name for name in record.SCHEMA.names if name != "messages"]
_OF_TEXTS = ["plain", "prompt_chars", "answer_chars", "quality"]


def collect(shards: Sequence[Path]) -> pa.Table:
    """The rows of all shards, in their order."""
    tables = []
    for number, shard in enumerate(shards):
        table = pq.read_table(shard / RECORDS, columns=_OF_RECORDS, read_dictionary=_NAMES)
        table = table.cast(pa.schema([field.with_type(_LARGE.get(field.name, field.type)) for field in table.schema]))
        texts = pq.read_table(shard / TEXTS, columns=_OF_TEXTS)
        places = {"shard": np.full(table.num_rows, number, np.int32), "row": np.arange(table.num_rows, dtype=np.int32)}
        for name, column in {**places, **{name: texts.column(name) for name in _OF_TEXTS}}.items():
            table = table.append_column(name, column if isinstance(column, pa.ChunkedArray) else pa.array(column))
        tables.append(table)
    return pa.concat_tables(tables).unify_dictionaries().combine_chunks()


def columns(shards: Sequence[Path], rows: Sequence[Index]) -> pa.Table:
    """What decides who of some rows stays (`keeping`); of each shard the numbers of those rows, rising."""
    schema = pa.schema([("time", pa.large_string()), ("id", pa.large_string()), ("quality", pa.float64())])
    tables = [schema.empty_table()]
    for shard, own in zip(shards, rows, strict=True):
        if len(own):
            table = pq.read_table(shard / RECORDS, columns=["time", "id"])
            table = table.append_column("quality", pq.read_table(shard / TEXTS, columns=["quality"]).column(0))
            tables.append(table.take(pa.array(own)).cast(schema))
    return pa.concat_tables(tables)


def read(path: Path) -> pa.Table:
    """Rows that `record.write` wrote."""
    return pq.read_table(path, read_dictionary=_NAMES).combine_chunks()


def by_shard(table: pa.Table, shards: int) -> list[Index]:
    """Of each shard the numbers of its rows that are in a table; the table's order is the shards'."""
    shard, row = (table.column(name).to_numpy() for name in ("shard", "row"))
    edges = np.searchsorted(shard, np.arange(shards + 1))
    return [row[first:last].astype(np.int64) for first, last in pairwise(edges)]


def conversations(table: pa.Table, shards: Sequence[Path]) -> Iterator[tuple[int, list[Message]]]:
    """(number in the table, messages) of every row, a shard after the other."""
    shard, row = (table.column(name).to_numpy() for name in ("shard", "row"))
    for number, wanted in grouped(shard, np.lexsort((row, shard))):
        yield from zip(wanted.tolist(), _messages(shards[number], row[wanted]), strict=True)


def grouped(keys: NDArray[np.integer], order: Index) -> Iterator[tuple[int, Index]]:
    """Each key with the numbers of its rows; `order` sorts the rows by their keys."""
    numbers, starts = np.unique(keys[order], return_index=True)
    ends = [*starts[1:].tolist(), len(order)]
    for number, first, last in zip(numbers.tolist(), starts.tolist(), ends, strict=False):
        yield number, order[first:last]


def _messages(shard: Path, wanted: Index) -> Iterator[list[Message]]:
    """What the wanted rows of a shard say; their numbers rise, and one may occur more than once."""
    file = pq.ParquetFile(shard / RECORDS)
    first = 0
    for group in range(file.num_row_groups):
        last = first + file.metadata.row_group(group).num_rows
        own = wanted[slice(*np.searchsorted(wanted, (first, last)))] - first
        if len(own):
            column = file.read_row_group(group, columns=["messages"]).column("messages")
            yield from map(record.load, column.take(pa.array(own)).to_pylist())
        first = last
