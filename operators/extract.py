"""Which rows of a quarantine go into Postgres: a bounded number, of every kind of reason, and how many there are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pyarrow as pa

MOST = 10_000
"""Rows of a quarantine that are copied at most."""
KINDS = 1_000
"""Pairs of source and kind that are told apart; what comes after these is counted as one of OTHER."""
OTHER = "(other reasons)"
BATCH = 1 << 16
CLIP = {"source": 200, "file": 500, "kind": 200, "reason": 500, "sample": 500}
"""Characters of each column that are kept."""

Group = tuple[str, str]
"""A source and a kind of reason."""


class Row(NamedTuple):
    """A bad record. `number` is its place in the parquet file, from 0; every text is one that Postgres takes."""

    number: int
    source: str
    file: str
    line: int
    kind: str
    reason: str
    sample: str


@dataclass(frozen=True)
class Extract:
    """The true counts, and the rows that were chosen."""

    counts: Counter[Group]
    rows: list[Row]


def extract(path: Path, most: int = MOST) -> Extract:
    """Read a quarantine twice, in batches: to count, and to take. The same file gives the same rows.

    Args:
        path: parquet with the columns source, file, line, reason, sample.
        most: rows to take at most; every group gets its share, what a small one leaves goes to the larger ones.
    """
    counts: Counter[Group] = Counter()
    for groups, _, size in _grouped(path, ["source", "reason"]):
        for group, count in zip(groups, size, strict=True):
            counts[_known(group, counts)] += int(count)
    return Extract(counts, list(_take(path, counts, shares(counts, most))))


def shares(counts: Mapping[Group, int], most: int) -> dict[Group, int]:
    """How many rows of each group are taken: as many of each as there are, or as fit when all get the same."""
    found: dict[Group, int] = {}
    left = most
    for place, (group, count) in enumerate(sorted(counts.items(), key=lambda item: (item[1], item[0]))):
        found[group] = min(count, left // (len(counts) - place))
        left -= found[group]
    return found


def text(value: bytes, most: int) -> str:
    """Bytes from a file as text for Postgres, which takes no NUL and nothing that is not UTF-8."""
    # A character has four bytes at most: a sample of a megabyte is not decoded for its first line.
    return value[: 4 * most].decode("utf-8", "replace")[:most].replace("\0", "␀")


def _take(path: Path, counts: Mapping[Group, int], wanted: Mapping[Group, int]) -> Iterator[Row]:
    """Rows spread evenly over each group: of n rows the i-th (from 0) is one of q where i·q mod n < q."""
    import numpy as np

    seen: Counter[Group] = Counter()
    first = 0
    for groups, batch, codes in _coded(path, ["source", "file", "line", "reason", "sample"]):
        groups = [_known(group, counts) for group in groups]
        merged = {group: number for number, group in enumerate(dict.fromkeys(groups))}
        codes = np.array([merged[group] for group in groups], np.int64)[codes]
        order = np.argsort(codes, kind="stable")
        size = np.bincount(codes, minlength=len(merged))
        rank = np.empty(len(codes), np.int64)
        rank[order] = np.arange(len(codes)) - np.repeat(np.cumsum(size) - size, size)
        index = rank + np.array([seen[group] for group in merged], np.int64)[codes]
        share = np.array([wanted[group] for group in merged], np.int64)[codes]
        whole = np.array([counts[group] for group in merged], np.int64)[codes]
        taken = np.flatnonzero(index * share % whole < share)
        names = list(merged)
        for number, row in zip(taken.tolist(), batch.take(taken).to_pylist(), strict=True):
            yield _row(first + number, row, names[codes[number]][1])
        seen.update(dict(zip(merged, size.tolist(), strict=True)))
        first += len(codes)


def _row(number: int, row: Mapping[str, Any], kind: str) -> Row:
    texts = {name: text(row[name] or b"", CLIP[name]) for name in ("source", "file", "reason", "sample")}
    return Row(number=number, line=int(row["line"] or 0), kind=kind, **texts)


def _grouped(path: Path, columns: list[str]) -> Iterator[tuple[list[Group], pa.Table, Any]]:
    import numpy as np

    for groups, batch, codes in _coded(path, columns):
        yield groups, batch, np.bincount(codes, minlength=len(groups))


def _coded(path: Path, columns: list[str]) -> Iterator[tuple[list[Group], pa.Table, Any]]:
    """Batches of the file with texts as bytes, the groups that occur, and each row's place among them."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    file = pq.ParquetFile(path)
    for batch in file.iter_batches(batch_size=BATCH, columns=columns):
        # As bytes: a reader takes strings at their word, and what is in quarantine need not keep it.
        table = pa.table({name: _bytes(batch.column(name)) for name in columns})
        source, reason = (pc.fill_null(table.column(name), b"").combine_chunks() for name in ("source", "reason"))
        kind = pc.replace_substring_regex(reason, pattern="(?s):.*", replacement="")
        coded = pc.binary_join_element_wise(source, kind, pa.scalar(b"\0", pa.binary())).dictionary_encode()
        groups = [_group(value) for value in coded.dictionary.to_pylist()]
        yield groups, table, coded.indices.to_numpy(zero_copy_only=False)


def _bytes(column: Any) -> Any:
    import pyarrow as pa

    textual = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
    return column.cast(pa.binary()) if textual else column


def _group(value: bytes) -> Group:
    source, _, kind = value.partition(b"\0")
    return text(source, CLIP["source"]), text(kind, CLIP["kind"])


def _known(group: Group, counts: Mapping[Group, int]) -> Group:
    return group if group in counts or len(counts) < KINDS else ("", OTHER)
