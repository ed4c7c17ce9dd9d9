"""Phase 6, pack: conversations become packs of tokens, and the dataset folder that training and evaluation read.

    train.*, validation.*   the packed format (refit.packed)
    heldout.parquet         the exam: what is asked, and the right answer, as text
    quarantine.parquet      the bad records of all phases
    data_docs/              what Great Expectations found at the door out

A conversation longer than a pack is refused (half an answer teaches to stop in the middle); a plain text is cut into
even pieces. No token is lost or doubled: that is asserted, not hoped for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from corpus import door, quarantine, record
from corpus.binpack import best_fit_decreasing
from corpus.mix import TIMES
from corpus.quarantine import Quarantine
from corpus.settings import PackSettings
from corpus.task import QUARANTINE, Facts, Task
from corpus.tokens import COMPARED, Encoder, Row
from refit import packed
from refit.errors import BadRecords
from refit.fingerprint import file_digest

CHUNK = 2048
HELDOUT = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("user", pa.string(), nullable=False),
        pa.field("domain", pa.string(), nullable=False),
        pa.field("label", pa.string()),
        pa.field("messages", pa.string(), nullable=False),
        pa.field("answer", pa.string(), nullable=False),
    ]
)


def run(task: Task) -> Facts:
    """Check, tokenize, pack, and write the dataset folder."""
    settings: PackSettings = task.settings
    mixed, tokenizer = task.inputs["records"], task.inputs["tokenizer"]
    encoder = Encoder(tokenizer)
    vocabulary = file_digest(tokenizer / "tokenizer.json")
    sides = {name: record.read(mixed / f"{name}.parquet") for name in ("train", "validation", "heldout")}
    bad = Quarantine()
    tokens: dict[str, Any] = {}
    kept: dict[str, pa.Table] = {"heldout": sides["heldout"]}
    for name in ("train", "validation"):
        rows, table = _tokenized(encoder, sides[name], settings.pack_length, bad, task)
        header = _write(task.folder, name, rows, encoder, vocabulary, settings)
        tokens[name] = {"packs": header.packs, "tokens": header.tokens, "targets": header.targets}
        tokens[name]["sources"] = _by_source(table, rows)
        kept[name] = table
    if tokens["train"]["packs"] == 0:
        raise BadRecords(f"no record is left to train on. Why: {dict(bad.reasons().most_common(3))}.")
    record.write(task.folder / "heldout.parquet", _heldout(sides["heldout"]))
    bad.save(task.folder / "own.parquet")
    earlier = [path for role, path in task.inputs.items() if role.startswith("quarantine/")]
    quarantine.merge([*(path / QUARANTINE for path in earlier), task.folder / "own.parquet"], task.folder / QUARANTINE)
    (task.folder / "own.parquet").unlink()
    checked = door.check(kept, settings, task.folder / "data_docs")
    sample = [record.load(messages) for messages in kept["train"].column("messages").slice(0, COMPARED).to_pylist()]
    return {
        "records_in": sum(side.num_rows for side in sides.values()),
        "records_out": sum(table.num_rows for table in kept.values()),
        "quarantined": len(bad),
        "reasons": dict(bad.reasons()),
        "records": {name: table.num_rows for name, table in kept.items()},
        "tokens": tokens,
        "pack_length": settings.pack_length,
        "vocabulary": vocabulary,
        "served_differently": {"of": len(sample), "count": encoder.differing(sample)},
        "expectations": checked,
        "seed": settings.seed,
    }


def _tokenized(
    encoder: Encoder, table: pa.Table, length: int, bad: Quarantine, task: Task
) -> tuple[list[list[Row]], pa.Table]:
    """The documents of each record that can be learnt from, as often as the mix sees it, and those records."""
    rows: list[list[Row]] = []
    kept: list[int] = []
    conversations = [record.load(messages) for messages in table.column("messages").to_pylist()]
    places = [table.column(name).to_pylist() for name in ("source", "file", "line")]
    times = table.column(TIMES).to_pylist() if TIMES in table.column_names else [1] * len(conversations)
    for start in range(0, len(conversations), CHUNK):
        for number, row in enumerate(encoder.rows(conversations[start : start + CHUNK]), start=start):
            plain = conversations[number][0]["role"] == record.TEXT
            fault = row if isinstance(row, str) else _too_long(row, length, plain)
            if fault or isinstance(row, str):
                source, file, line = (place[number] for place in places)
                bad.add(source, file, line, fault or "", record.answer(conversations[number]))
                continue
            rows.append(list(pieces(row, length)) * times[number])
            kept.append(number)
        task.progress(start, len(conversations))
    return rows, table.take(pa.array(kept, pa.int64()))


def _too_long(row: Row, length: int, plain: bool) -> str:
    return "" if plain or len(row) <= length else f"longer than a pack: {len(row)} tokens, data.pack_length is {length}"


def pieces(row: Row, length: int) -> Iterator[Row]:
    """A document in as few even pieces as fit into packs; the first token of a piece has nothing to be told from."""
    count = -(-len(row) // length)
    edges = [len(row) * piece // count for piece in range(count + 1)]
    for first, last in pairwise(edges):
        mask = row.mask[first:last].copy()
        mask[0] = 0
        yield Row(row.ids[first:last], mask)


def _write(
    folder: Path, split: str, rows: list[list[Row]], encoder: Encoder, vocabulary: str, settings: PackSettings
) -> packed.Header:
    documents = [piece for row in rows for piece in row]
    tokens, segments, mask = into_packs(documents, settings.pack_length, encoder.pad, settings.seed)
    return packed.write(
        folder, split, tokens=tokens, segments=segments, mask=mask, vocabulary=vocabulary,
        vocabulary_size=encoder.size, samples=len(documents),
    )  # fmt: skip


def into_packs(
    documents: list[Row], length: int, pad: int, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8]]:
    """Tokens, segments and mask of shape (packs, length), the packs in a seeded order.

    Best-fit puts long documents into the first packs; without the shuffle training would see them first.
    """
    lengths = np.array([len(document) for document in documents], np.int64)
    packing = best_fit_decreasing(lengths, length)
    shape = (packing.packs, length)
    tokens, segments, mask = np.full(shape, pad, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.uint8)
    if not documents:
        return tokens, segments, mask
    pack = np.random.default_rng(seed).permutation(packing.packs)[packing.pack]
    # Documents of a pack are numbered from 1 in the order in which they lie there.
    order = np.lexsort((packing.place, pack))
    first_of_pack = np.searchsorted(pack[order], pack[order], side="left")
    number = np.empty(len(documents), np.int64)
    number[order] = np.arange(len(documents)) - first_of_pack + 1
    starts = np.cumsum(lengths) - lengths
    target = np.repeat(pack * length + packing.place - starts, lengths) + np.arange(lengths.sum())
    tokens.reshape(-1)[target] = np.concatenate([document.ids for document in documents])
    mask.reshape(-1)[target] = np.concatenate([document.mask for document in documents])
    segments.reshape(-1)[target] = np.repeat(number, lengths)
    if int((segments > 0).sum()) != int(lengths.sum()):
        raise AssertionError("packing lost or doubled tokens")
    return tokens, segments, mask


def _by_source(table: pa.Table, rows: list[list[Row]]) -> dict[str, dict[str, float]]:
    """Tokens and their share, by source: what the mix came to."""
    counts: Counter[str] = Counter()
    for source, row in zip(table.column("source").to_pylist(), rows, strict=True):
        counts[source] += sum(map(len, row))
    total = counts.total()
    return {name: {"tokens": count, "share": count / total} for name, count in sorted(counts.items())}


def _heldout(table: pa.Table) -> pa.Table:
    conversations = [record.load(messages) for messages in table.column("messages").to_pylist()]
    return pa.table(
        {
            "id": table.column("id"),
            "user": pa.array([user or "" for user in table.column("user").to_pylist()], pa.string()),
            "domain": table.column("domain"),
            "label": table.column("label"),
            "messages": pa.array([record.dump(messages[:-1]) for messages in conversations], pa.string()),
            "answer": pa.array([record.answer(messages) for messages in conversations], pa.string()),
        },
        schema=HELDOUT,
    )
