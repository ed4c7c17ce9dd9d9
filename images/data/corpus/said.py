"""What records say, normalised, beside each shard's records: clean writes it, sign, dedup and split compare by it.

    texts.parquet   of every record: what is asked and the last answer as `text.lines` gives them, a key of each (two
                    texts with one key are exact duplicates), whether it is a plain text, how long it was as it came,
                    and its quality where the line has a model for that
    lines.parquet   the lines that many of a shard's texts have, with how many; the empty line stands for all of them

An instruction that stands before every example would make any two of them near duplicates: a line that many texts of
a source share is its form, and is left out where texts are compared. Only all shards of a source tell it: it is in
clean's own folder, `forms/<kind>/<source>.json`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash
from numpy.typing import NDArray

from corpus import record, text
from corpus.shingles import Texts
from corpus.task import LINES, SHARDS, TEXTS, Kind, form_file
from refit import files

Index = NDArray[np.int64]

KEY = pa.binary(16)
SCHEMA = pa.schema(
    [
        pa.field("asked", pa.string(), nullable=False),
        pa.field("answer", pa.string(), nullable=False),
        pa.field("said_key", KEY, nullable=False),
        pa.field("asked_key", KEY, nullable=False),
        pa.field("plain", pa.bool_(), nullable=False),
        pa.field("prompt_chars", pa.int64(), nullable=False),
        pa.field("answer_chars", pa.int64(), nullable=False),
        pa.field("quality", pa.float64()),
    ]
)
# Only lines of at least this share of a shard's texts are told on: what is missing of a sum is a hundredth of the share
# that makes a line form.
TOLD_SHARE = text.BOILERPLATE_SHARE / 100


class Writer:
    """Writes both files of a shard."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = record.writer(folder / TEXTS, SCHEMA)
        # Most lines occur once: of those only a hash is held, and a line is counted from its second text on.
        self._counts: dict[Kind, Counter[str]] = {"said": Counter(), "asked": Counter()}
        self._once: dict[Kind, set[int]] = {"said": set(), "asked": set()}
        self._seen: dict[Kind, set[bytes]] = {"said": set(), "asked": set()}
        self._source = ""

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        record.write(self._folder / LINES, pa.Table.from_pylist(list(self._told()), _LINES))

    def write(
        self, source: str, conversations: Sequence[Sequence[Mapping[str, Any]]], quality: Sequence[float | None]
    ) -> None:
        """Add what a group of records says; all groups of a shard are of one source."""
        self._source = source
        rows = [(*self._row(messages), grade) for messages, grade in zip(conversations, quality, strict=True)]
        columns = zip(*rows, strict=True) if rows else [[] for _ in SCHEMA]
        arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
        self._file.write_table(pa.table(arrays, schema=SCHEMA))

    def _row(self, messages: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
        plain = messages[0]["role"] == record.TEXT
        asked, answer = record.prompt(messages), "" if plain else record.answer(messages)
        # Two pairs that differ in what is rejected teach different things.
        asked_lines, answer_lines = text.lines(asked), text.lines(f"{answer}\n{messages[-1].get(record.REJECTED, '')}")
        said = joined(asked_lines, answer_lines)
        keys = self._count("said", said), self._count("asked", asked_lines)
        return asked_lines, answer_lines, *keys, plain, len(asked), len(answer if not plain else asked)

    def _count(self, kind: Kind, lines: str) -> bytes:
        """Count the lines of a text that was not there before; returns its key."""
        key = xxhash.xxh3_128_digest(lines.replace("\n", " ").encode())
        if key not in self._seen[kind]:
            self._seen[kind].add(key)
            different = set(lines.split("\n"))
            hashes = set(map(hash, different))
            if again := hashes & self._once[kind]:
                self._counts[kind].update(line for line in different if hash(line) in again)
            self._once[kind] |= hashes
        return key

    def _told(self) -> Iterator[dict[str, Any]]:
        for kind, counts in self._counts.items():
            total = len(self._seen[kind])
            yield {"source": self._source, "kind": kind, "line": "", "count": total}
            for line, more in sorted(counts.items()):
                if line and more + 1 >= TOLD_SHARE * total:
                    yield {"source": self._source, "kind": kind, "line": line, "count": more + 1}


_LINES = pa.schema([("source", pa.string()), ("kind", pa.string()), ("line", pa.string()), ("count", pa.int64())])


def joined(asked: str, answer: str) -> str:
    """Everything that is said, of its two parts."""
    return f"{asked}\n{answer}" if asked and answer else asked or answer


def keys(shard: Path, kind: Kind) -> NDArray[np.uint64]:
    """The keys of a shard's texts, of shape (records, 2)."""
    column = pq.read_table(shard / TEXTS, columns=[f"{kind}_key"]).column(0)
    parts = [
        np.frombuffer(chunk.buffers()[1], np.uint64).reshape(-1, 2)[chunk.offset : chunk.offset + len(chunk)]
        for chunk in column.chunks
        if len(chunk)
    ]
    return np.concatenate([np.zeros((0, 2), np.uint64), *parts])


def write_forms(lines: Mapping[str, Sequence[Path]], folder: Path) -> None:
    """Write the form of each source, of what its shards tell; `lines` has their files."""
    for source, paths in lines.items():
        counts: dict[Kind, Counter[str]] = {kind: Counter() for kind in get_args(Kind)}
        for row in (row for path in paths for row in pq.read_table(path).to_pylist()):
            counts[row["kind"]][row["line"]] += row["count"]
        for kind, count in counts.items():
            found = sorted(text.form(count, total=count.pop("", 0)))
            files.write(folder / form_file(source, kind), json.dumps(found, ensure_ascii=False).encode())


def read_form(path: Path) -> frozenset[str]:
    """The form of a source."""
    return frozenset(json.loads(path.read_bytes()))


def forms(clean: Path, kind: Kind) -> list[frozenset[str]]:
    """Of each shard of clean, whose own folder is given, the lines that are its source's form."""
    of = [shard["source"] for shard in json.loads((clean / SHARDS).read_bytes())]
    found = {source: read_form(clean / form_file(source, kind)) for source in set(of)}
    return [found[source] for source in of]


@dataclass(frozen=True)
class Chosen:
    """The comparable texts of some rows, numbered on through all shards; gone through a shard at a time, at any time.

    Args:
        shards: folders with texts.parquet.
        rows: of each shard the numbers of the rows that count, rising.
        forms: of each shard the lines to leave out.
        kind: what is compared.
    """

    shards: Sequence[Path]
    rows: Sequence[Index]
    forms: Sequence[frozenset[str]]
    kind: Kind

    def __iter__(self) -> Iterator[Texts]:
        for shard, rows, form in zip(self.shards, self.rows, self.forms, strict=True):
            if len(rows):
                yield Texts.of_array(self._texts(shard, rows, form))

    def _texts(self, shard: Path, rows: Index, form: frozenset[str]) -> pa.Array:
        found = read(shard, self.kind).take(pa.array(rows))
        if form:
            found = pa.array([text.without(one, form) for one in found.to_pylist()], pa.large_string())
        return found


def read(shard: Path, kind: Kind) -> pa.Array:
    """The texts of a shard, as one array of large strings."""
    table = pq.read_table(shard / TEXTS, columns=["asked"] if kind == "asked" else ["asked", "answer"])
    columns = [column.cast(pa.large_string()).combine_chunks() for column in table.columns]
    if kind == "asked":
        return columns[0]
    asked, answer = columns
    both = pc.and_(pc.not_equal(asked, ""), pc.not_equal(answer, ""))
    middle = pc.if_else(both, pa.scalar("\n", pa.large_string()), pa.scalar("", pa.large_string()))
    return pc.binary_join_element_wise(asked, middle, answer, pa.scalar("", pa.large_string()))
