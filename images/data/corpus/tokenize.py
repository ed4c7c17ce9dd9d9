"""Phase 3, tokenize: what every record of a shard says as tokens with a mask, in the flat format (`corpus.flat`).

Document i is row i of the shard's records; one that cannot be learnt from is refused, has no tokens, and is in
quarantine. How long a pack is, who is held out and how often a record is seen are later questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from corpus import flat, learn, record
from corpus.quarantine import Quarantine
from corpus.record import Message
from corpus.settings import Learn, TokenizeSettings
from corpus.task import QUARANTINE, RECORDS, Facts, Task
from corpus.tokens import ANY_LENGTH, Encoded, Encoder
from refit.fingerprint import file_digest
from refit.spec import TokenLimits

NAME = "documents"


def run(task: Task) -> Facts:
    """Tokenize a shard, a group of rows at a time."""
    settings: TokenizeSettings = task.settings
    folder = task.inputs["tokenizer"]
    vocabulary = file_digest(folder / "tokenizer.json")
    encoder = _encoder(folder, tuple(file_digest(path) for path in sorted(folder.iterdir())))
    given = pq.ParquetFile(task.inputs["records"] / RECORDS)
    seen = 0
    with (
        Quarantine(task.folder / QUARANTINE) as quarantine,
        flat.Writer(
            task.folder, NAME, vocabulary=vocabulary, vocabulary_size=encoder.size, pairs=settings.learn == "pairs"
        ) as out,
    ):
        for group in range(given.num_row_groups):
            table = given.read_row_group(group)
            conversations = [record.load(messages) for messages in table.column("messages").to_pylist()]
            ids = table.column("id").to_pylist()
            encoded = write(out, encoder, conversations, ids, settings.tokens, settings.learn)
            places = [table.column(name).to_pylist() for name in ("source", "file", "line")]
            for at, reason in encoded.refused:
                source, file, line = (place[at] for place in places)
                quarantine.add(source, file, line, reason, record.answer(conversations[at]))
            seen += table.num_rows
            task.progress(seen, given.metadata.num_rows)
    return {
        "records_in": seen,
        "records_out": seen - len(quarantine),
        "quarantined": len(quarantine),
        "reasons": quarantine.reasons(),
        "tokens": out.header.tokens,
        "targets": out.header.targets,
    }


@lru_cache(maxsize=1)
def _encoder(folder: Path, digests: tuple[str, ...]) -> Encoder:
    """Kept from shard to shard: to load one and to prove its fast tokenizer takes half a second."""
    return Encoder(folder)


def write(
    out: flat.Writer, encoder: Encoder, conversations: Sequence[Sequence[Message]], ids: Sequence[str],
    limits: TokenLimits = ANY_LENGTH, wanted: Learn = "answers",
) -> Encoded:  # fmt: skip
    """Add conversations to a flat set, each with its id in hex; returns what they came to."""
    encoded, halves = learn.encode(encoder, conversations, limits, wanted)
    talk = flat.PAIR if wanted == "pairs" else flat.CONVERSATION
    kinds = np.array([flat.TEXT if one[0]["role"] == record.TEXT else talk for one in conversations])
    kinds[encoded.lengths == 0] = flat.REFUSED
    out.append(encoded.tokens, encoded.mask, encoded.lengths, _bytes(ids), kinds, halves)
    return encoded


def _bytes(ids: Sequence[str]) -> NDArray[np.uint8]:
    return np.frombuffer(bytes.fromhex("".join(ids)), np.uint8).reshape(-1, flat.ID_BYTES)
