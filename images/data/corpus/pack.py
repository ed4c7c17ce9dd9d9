"""Phase 9, pack: the chosen documents become packs of tokens, and the dataset folder that training and evaluation read.

    train.*, validation.*   the packed format (refit.packed), and the domain of each document (refit.domains)
    heldout.parquet         the exam: what is asked, and the right answer, as text
    quarantine.parquet      the bad records of all phases
    data_docs/              what Great Expectations found at the door out

A conversation longer than a pack is refused (half an answer teaches to stop in the middle), and so is a preference pair
whose sides do not both fit into one; a plain text is cut into even pieces. No token is lost or doubled: that is
asserted, not hoped for.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from corpus import door, quarantine, questions, record, rows, sides
from corpus.packing import pack_documents
from corpus.quarantine import Quarantine
from corpus.record import GROUP_ROWS, WEIGHT, Message
from corpus.settings import PackSettings
from corpus.sides import Side
from corpus.task import QUARANTINE, Facts, Task
from corpus.tokens import COMPARED, Encoder
from refit import domains, packed
from refit.errors import BadRecords

PACKED, HELD = ("train", "validation"), "heldout"
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
    """Pack, check, and write the dataset folder."""
    settings: PackSettings = task.settings
    encoder, shards = Encoder(task.inputs["tokenizer"]), task.shards["records"]
    sets = sides.open_sets(task.shards["tokens"])
    scratch = task.folder / "scratch"
    scratch.mkdir()
    own = scratch / QUARANTINE
    tokens: dict[str, Any] = {}
    kept: dict[str, pa.Table] = {}
    with Quarantine(own) as bad:
        for number, name in enumerate((*PACKED, HELD), start=1):
            table = rows.read(task.inputs["rows"] / f"{name}.parquet")
            side = sides.open_side(table, sets, shards, encoder, scratch, settings.learn)
            if name != HELD:
                side, header = _pack(side, name, task, encoder, bad)
                tokens[name] = {"packs": header.packs, "tokens": header.tokens, "targets": header.targets}
                if header.pairs is not None:
                    tokens[name]["pairs"] = header.pairs
                tokens[name]["sources"] = _by_source(side)
            kept[name] = side.table
            task.progress(number, 3)
    if tokens["train"]["packs"] == 0:
        raise BadRecords(f"no record is left to train on. Why: {bad.worst()}.")
    write_heldout(kept[HELD], shards, task.folder / "heldout.parquet")
    before = [task.inputs[role] / QUARANTINE for role in ("ingested", "records", "tokens")]
    quarantine.merge([*before, own], task.folder / QUARANTINE)
    for path in scratch.iterdir():
        path.unlink()
    scratch.rmdir()
    checked = door.ask(questions.out(kept, tokens, settings), task.folder / "data_docs")
    door.require(checked, "out")
    sample = [messages for _, messages in rows.conversations(kept["train"].slice(0, COMPARED), shards)]
    return {
        "records_in": sum(table.num_rows for table in kept.values()) + len(bad),
        "records_out": sum(table.num_rows for table in kept.values()),
        "quarantined": len(bad),
        "reasons": bad.reasons(),
        "records": {name: table.num_rows for name, table in kept.items()},
        "tokens": tokens,
        "pack_length": settings.pack_length,
        "vocabulary": header.vocabulary,
        "served_differently": {"of": len(sample), "count": encoder.differing(sample)},
        "expectations": checked,
        "seed": settings.seed,
    }


def _pack(side: Side, name: str, task: Task, encoder: Encoder, bad: Quarantine) -> tuple[Side, packed.Header]:
    """Write a split; what does not fit goes to quarantine. Returns the rows that are in it."""
    settings: PackSettings = task.settings
    lengths = side.lengths
    result = pack_documents(
        side.sets, side.documents, side.times, length=settings.pack_length, pad=encoder.pad, seed=settings.seed,
        folder=task.folder, split=name, vocabulary=side.sets[0].header.vocabulary, vocabulary_size=encoder.size,
    )  # fmt: skip
    names = side.table.column("domain").to_pylist()
    own = [names[row] for row in result.pieces.tolist()]
    domains.write(task.folder, name, own, result.packs, result.header.packs)
    refused = side.table.take(pa.array(result.refused))
    places = [refused.column(column).to_pylist() for column in ("source", "file", "line")]
    for number, messages in rows.conversations(refused, task.shards["records"]):
        source, file, line = (place[number] for place in places)
        length = lengths[result.refused[number]]
        both = " in both sides together" if settings.learn == "pairs" else ""
        reason = f"longer than a pack: {length} tokens{both}, data.pack_length is {settings.pack_length}"
        bad.add(source, file, line, reason, record.answer(messages))
    stays = np.ones(len(lengths), bool)
    stays[result.refused] = False
    return side.only(stays), result.header


def _by_source(side: Side) -> dict[str, dict[str, float]]:
    """Tokens and their share, by source: what the mix came to."""
    sources = np.array(side.table.column("source").to_pylist(), object)
    tokens = side.lengths * side.times
    counts = {name: int(tokens[sources == name].sum()) for name in sorted(set(sources.tolist()))}
    total = sum(counts.values())
    return {name: {"tokens": count, "share": count / total} for name, count in counts.items()}


def write_heldout(table: pa.Table, shards: Sequence[Path], path: Path) -> None:
    """The exam: of every item what is asked as messages, and the right answer."""
    with record.writer(path, HELDOUT) as out:
        for first in range(0, max(1, table.num_rows), GROUP_ROWS):
            group = table.slice(first, GROUP_ROWS).combine_chunks()
            conversations = [messages for _, messages in rows.conversations(group, shards)]
            columns = {
                "id": group.column("id"),
                "user": pa.array([user or "" for user in group.column("user").to_pylist()], pa.string()),
                "domain": group.column("domain"),
                "label": group.column("label"),
                "messages": pa.array([record.dump(_asked(messages)) for messages in conversations], pa.string()),
                "answer": pa.array([record.answer(messages) for messages in conversations], pa.string()),
            }
            out.write_table(pa.table(columns).cast(HELDOUT))


def _asked(messages: Sequence[Message]) -> list[Message]:
    """All but the last answer, without what is for training only: an item is the same whatever its turns weigh."""
    return [{key: value for key, value in message.items() if key != WEIGHT} for message in messages[:-1]]
