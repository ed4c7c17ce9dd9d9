"""`corpus pack`: files of any format that the data stage reads become tokens and packs, without a pipeline.

    documents.*          the tokens of every record, in the flat format (corpus.flat)
    train.*              the packs, in the packed format (refit.packed)
    quarantine.parquet   what could not be read, learnt from or packed, and why
    manifest.json        what all this was made of, last

Nothing is cleaned, deduplicated or mixed: every record is seen once.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from corpus import flat, formats, readers, record
from corpus.flat import REFUSED, TEXT
from corpus.packing import Overflow, Result, pack_documents
from corpus.quarantine import SAMPLE, Quarantine
from corpus.record import Bad, Message
from corpus.tokenize import write
from corpus.tokens import Encoder
from refit import fingerprint
from refit.errors import BadInput, BadRecords
from refit.manifest import Manifest
from refit.store import store_for

DOCUMENTS, TRAIN, QUARANTINE = "documents", "train", "quarantine.parquet"
BATCH = 2048


@dataclass
class _Places:
    """Where each document came from, and of those too long for a pack a sample: they may yet be set aside."""

    file: array[int] = field(default_factory=lambda: array("q"))
    line: array[int] = field(default_factory=lambda: array("q"))
    samples: dict[int, str] = field(default_factory=dict)


def pack_files(
    inputs: Sequence[Path], tokenizer: Path, output: Path, *, length: int, seed: int, overflow: Overflow
) -> dict[str, Any]:
    """Tokenize and pack every record of some files.

    Args:
        inputs: files of any format that the data stage reads.
        tokenizer: a folder with tokenizer.json, tokenizer_config.json and the chat template.
        output: a folder that is not there yet, or empty; it is there whole or not at all.
        length: tokens of a pack.
        seed: of the order of the packs.
        overflow: what becomes of documents longer than a pack.

    Returns:
        Counts, and the `seconds` that it took.

    Raises:
        BadInput: a file is missing, the tokenizer is not whole, or the output is not empty.
        BadRecords: no record is left to train on.
    """
    started = time.perf_counter()
    _require(inputs, tokenizer, output)
    encoder = Encoder(tokenizer)
    vocabulary = fingerprint.file_digest(tokenizer / "tokenizer.json")
    store = store_for(output.absolute().as_uri())
    with store.publish(output.absolute().as_uri()) as draft:
        with Quarantine(draft.path / QUARANTINE) as bad:
            places = _tokenize(inputs, encoder, draft.path, vocabulary, length, bad)
            documents = flat.read(draft.path, DOCUMENTS)
            numbers = np.flatnonzero(documents.kinds != REFUSED)
            result = pack_documents(
                [documents], np.stack([np.zeros_like(numbers), numbers], axis=1), np.ones(len(numbers), np.int64),
                length=length, pad=encoder.pad, seed=seed, folder=draft.path, split=TRAIN, vocabulary=vocabulary,
                vocabulary_size=encoder.size, overflow=overflow,
            )  # fmt: skip
            for row in [*result.refused.tolist(), *result.dropped.tolist()]:
                number = int(numbers[row])
                name = inputs[places.file[number]].name
                bad.add(_source(name), name, places.line[number], _too_long(documents, number, length, overflow),
                        places.samples[number])  # fmt: skip
        if result.header.packs == 0:
            raise BadRecords(f"no record is left to train on. Why: {bad.worst() or 'no rows'}.")
        told = _told(documents, result, bad)
        draft.commit(_manifest(inputs, tokenizer, told, {"length": length, "seed": seed, **vars(overflow)}))
    return {**told, "seconds": time.perf_counter() - started}


def _require(inputs: Sequence[Path], tokenizer: Path, output: Path) -> None:
    for path in inputs:
        if not path.is_file():
            raise BadInput(f"{path}: there is no such file.")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if not (tokenizer / name).is_file():
            raise BadInput(f"--tokenizer is {tokenizer}: no {name} there. Give the folder of a base model.")
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise BadInput(f"--output is {output}: something is there already. Give a new folder, or empty it.")


def _tokenize(
    inputs: Sequence[Path], encoder: Encoder, folder: Path, vocabulary: str, length: int, bad: Quarantine
) -> _Places:
    """Write the flat set, a batch of records at a time; a record that teaches nothing is a refused document."""
    places = _Places()
    records = _records(inputs, bad)
    with flat.Writer(folder, DOCUMENTS, vocabulary=vocabulary, vocabulary_size=encoder.size) as writer:
        while batch := list(islice(records, BATCH)):
            conversations = [messages for _, _, messages in batch]
            # Named by content: the same text has the same id, in whatever file.
            ids = [xxhash.xxh3_128_hexdigest(record.dump(messages)) for messages in conversations]
            encoded = write(writer, encoder, conversations, ids)
            first = len(places.file)
            places.file.extend(file for file, _, _ in batch)
            places.line.extend(line for _, line, _ in batch)
            for number, why in encoded.refused:
                name, line = inputs[batch[number][0]].name, batch[number][1]
                bad.add(_source(name), name, line, why, record.answer(conversations[number]))
            for number in np.flatnonzero(encoded.lengths > length).tolist():
                places.samples[first + number] = record.answer(conversations[number])[:SAMPLE]
    return places


def _records(inputs: Sequence[Path], bad: Quarantine) -> Iterator[tuple[int, int, list[Message]]]:
    """Number of the file, line and messages of every row that is a record; the others are set aside."""
    for file, path in enumerate(inputs):
        for line, row in readers.read(path, path.name):
            try:
                if isinstance(row, readers.Fault):
                    raise Bad(row.reason)
                messages = formats.conversation(row, "auto", {})
                record.check(messages)
            except Bad as fault:
                sample = row.sample if isinstance(row, readers.Fault) else row
                bad.add(_source(path.name), path.name, line, str(fault), sample)
                continue
            yield file, line, messages


def _source(name: str) -> str:
    return readers.unpacked(name).rpartition(".")[0] or name


def _too_long(documents: flat.Flat, number: int, length: int, overflow: Overflow) -> str:
    tokens = len(documents.document(number)[0])
    kind = "a text" if documents.kinds[number] == TEXT else "a conversation"
    why = ", and its head has no answer" if kind == "a conversation" and overflow.conversation == "truncate" else ""
    return f"{kind} longer than a pack{why}: {tokens} tokens, --length is {length}"


def _told(documents: flat.Flat, result: Result, bad: Quarantine) -> dict[str, Any]:
    counts = result.counts.as_dict()
    return {
        "documents": counts.pop("documents"),
        "records": len(documents),
        **{name: counts[name] for name in ("packs", "tokens", "targets", "waste", "pieces", "split")},
        "truncated": counts["truncated"],
        "dropped": counts["dropped"],
        "quarantined": len(bad),
        "refused": bad.reasons(),
    }


def _manifest(inputs: Sequence[Path], tokenizer: Path, told: dict[str, Any], settings: dict[str, Any]) -> Manifest:
    digests = {f"input/{number}/{path.name}": fingerprint.file_digest(path) for number, path in enumerate(inputs)}
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (tokenizer / name).is_file():
            digests[f"tokenizer/{name}"] = fingerprint.file_digest(tokenizer / name)
    code = fingerprint.code_digest("corpus.pack_files")
    name = fingerprint.fingerprint("pack-files", code, settings, digests)
    return Manifest(kind="packs", fingerprint=name, inputs=digests, facts={**told, "settings": settings})
