"""Invented tickets as a packed dataset: what the data stage would make of them, small and written down by hand."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from refit import domains, packed
from refit.fingerprint import file_digest
from refit.manifest import Manifest
from refit.packed import WHOLE
from refit.store import store_for

INTENTS = {
    "refund": ("I want my money back for order {n}", "please refund {n}", "the charge {n} was wrong, pay it back"),
    "delivery": ("where is parcel {n}", "order {n} has not arrived", "the driver left {n} at the wrong door"),
    "password": ("I cannot log in as user {n}", "reset my password, account {n}", "code {n} does not open my account"),
}
LENGTH = 128


def tickets(count: int, seed: int = 1) -> list[tuple[str, str]]:
    """Pairs of a ticket and its answer."""
    draw = random.Random(seed)
    pairs = []
    for _ in range(count):
        intent = draw.choice(sorted(INTENTS))
        text = draw.choice(INTENTS[intent]).format(n=draw.randrange(1000, 9999))
        pairs.append((text, json.dumps({"intent": intent})))
    return pairs


def corpus(path: Path, count: int = 400) -> Path:
    """The tickets as a jsonl file, to learn a tokenizer from."""
    path.write_text("".join(json.dumps({"ticket": t, "answer": a}) + "\n" for t, a in tickets(count)), encoding="utf-8")
    return path


def documents(base: Path, count: int, seed: int = 1) -> list[tuple[list[int], list[int]]]:
    """Token ids and mask of each ticket, in ChatML; learnt is the answer with what ends it."""
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    out = []
    for text, answer in tickets(count, seed):
        ask = tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n").ids
        reply = tokenizer.encode(f"{answer}<|im_end|>").ids
        out.append((ask + reply, [0] * len(ask) + [WHOLE] * len(reply)))
    return out


def pack(docs: list[tuple[list[int], list[int]]], length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Documents one after the other into packs, a new pack where one does not fit; three arrays (packs, length)."""
    rows: list[list[tuple[list[int], list[int]]]] = [[]]
    for document in docs:
        if sum(len(ids) for ids, _ in rows[-1]) + len(document[0]) > length:
            rows.append([])
        rows[-1].append(document)
    tokens, segments, mask = (np.zeros((len(rows), length), dtype=np.int64) for _ in range(3))
    for index, row in enumerate(rows):
        place = 0
        for number, (ids, learn) in enumerate(row, start=1):
            end = place + len(ids)
            tokens[index, place:end], segments[index, place:end], mask[index, place:end] = ids, number, learn
            place = end
    return tokens, segments, mask


def dataset(uri: str, base: Path, count: int = 400, length: int = LENGTH, weights: tuple[int, ...] = (WHOLE,)) -> str:
    """Commit a dataset of tickets whose answers weigh in turn what `weights` says; returns its address."""
    vocabulary = file_digest(base / "tokenizer.json")
    with store_for(uri).publish(uri) as draft:
        for split, number, seed in (("train", count, 1), ("validation", 40, 2)):
            turns = zip(documents(base, number, seed), itertools.cycle(weights))
            weighed = [(ids, [own if one else 0 for one in learn]) for (ids, learn), own in turns]
            tokens, segments, mask = pack(weighed, length)
            packed.write(
                draft.path, split, tokens=tokens, segments=segments, mask=mask, vocabulary=vocabulary,
                vocabulary_size=int(tokens.max()) + 1, samples=number,
            )  # fmt: skip
            own = [json.loads(answer)["intent"] for _, answer in tickets(number, seed)]
            packs = np.repeat(np.arange(len(segments)), segments.max(axis=1))
            domains.write(draft.path, split, own, packs, len(segments))
        draft.commit(Manifest(kind="dataset", fingerprint="tickets"))
    return uri
