"""Phase 7, split and decontaminate: who is trained on, watched and held out; and nothing is on two sides.

The side follows from a hash of the session, or of what is asked where there is no session: a record keeps its side
when data grows, and people's sessions are never cut in two. Then whatever is asked of training that is the same as, or
near to, what is asked of the other sides is removed, so that an exam is no memory test; and so is what holds a question
of the evaluation sets in `data.decontaminate`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from corpus import lsh, overlap, record, removed, rows, said, sign
from corpus.decontaminate import gather, question, with_evaluation
from corpus.keeping import first_of_each
from corpus.minhash import Signed
from corpus.removed import Removals
from corpus.rows import ROWS, SIDES
from corpus.settings import SplitSettings
from corpus.shingles import Texts
from corpus.task import EVALUATION, REMOVED, Facts, Task
from refit.spec import Dedup, Split

Index = NDArray[np.int64]
Keys = NDArray[np.uint64]

CONTAMINATED = "contaminated.parquet"


def run(task: Task) -> Facts:
    """Give every record its side, and remove what would be on two."""
    settings: SplitSettings = task.settings
    shards = task.shards["records"]
    table = rows.read(task.inputs["rows"] / ROWS)
    here = rows.by_shard(table, len(shards))
    sides = _sides(table, _asked(shards, here), settings)
    table = table.append_column("split", pa.array(sides, pa.string()).dictionary_encode())
    task.progress(table.num_rows // 3, table.num_rows)
    form, places = said.forms(task.inputs["records"], "asked"), table.select(["shard", "row"])

    def by_shard(some: Index) -> list[Index]:
        return rows.by_shard(places.take(pa.array(some)), len(shards))

    def signed(some: Index) -> Signed:
        return sign.stored(task.shards["signatures"], by_shard(some), "asked")

    def texts(some: Index) -> said.Chosen:
        return said.Chosen(shards, by_shard(some), form, "asked")

    keys = np.concatenate([said.keys(shard, "asked")[own] for shard, own in zip(shards, here, strict=True)])
    rank = np.array([SIDES.index(name) for name in sides], np.int64)
    removals = contaminated(keys, rank, signed, texts, settings.dedup)
    evaluation = [path for role, path in task.inputs.items() if role.startswith(f"{EVALUATION}/")]
    held = holding(evaluation, table, shards, settings, task.folder / CONTAMINATED)
    kept = removed.take_out(table, removals, task.folder / REMOVED, besides=held)
    record.write(task.folder / ROWS, kept)
    counts = Counter(kept.column("split").to_pylist())
    return {
        "records_in": table.num_rows,
        "records_out": kept.num_rows,
        "quarantined": 0,
        "removed": {**removed.counted(removals), "evaluation": len(held)},
        "sides": {name: counts[name] for name in SIDES},
    }


def _asked(shards: Sequence[Path], here: Sequence[Index]) -> Iterator[str]:
    """What each row asks, in their order."""
    for shard, own in zip(shards, here, strict=True):
        if len(own):
            yield from said.read(shard, "asked").take(pa.array(own)).to_pylist()


def _sides(table: pa.Table, asked: Iterator[str], settings: SplitSettings) -> list[str]:
    columns = (table.column(name).to_pylist() for name in ("source", "session", "plain"))
    return [
        "train" if source in settings.rehearsal else side(settings.split, session, asks.replace("\n", " "), plain=plain)
        for source, session, plain, asks in zip(*columns, asked, strict=True)
    ]


def holding(
    evaluation: Sequence[Path], table: pa.Table, shards: Sequence[Path], settings: SplitSettings, path: Path
) -> Index:
    """Training rows that hold a question of an evaluation set; writes down which one, and how much of it."""
    if not evaluation or not table.num_rows:
        return np.zeros(0, np.int64)
    asked = gather(evaluation, question)
    guarded = overlap.Guarded.of(Texts.of(asked.texts), settings.ngram, settings.min_words)
    whole = said.Chosen(shards, rows.by_shard(table, len(shards)), [frozenset()] * len(shards), "said")
    parts = [overlap.held(texts, guarded) for texts in whole]
    found, share = (np.concatenate(side) for side in zip(*parts, strict=True))
    training = np.array([name == "train" for name in table.column("split").to_pylist()], bool)
    held: Index = np.flatnonzero(training & (found >= 0) & (share >= settings.threshold))
    listed = table.select(["id", "source", "file", "line"]).take(pa.array(held))
    record.write(path, with_evaluation(listed, asked, found[held], share[held]))
    return held


def side(split: Split, session: str | None, question: str, *, plain: bool = False) -> str:
    """The side of a record. A plain text cannot be asked, so it is never held out."""
    unit = f"session\0{session}" if session is not None else f"question\0{question}"
    draw = int.from_bytes(hashlib.blake2b(f"{split.salt}\0{unit}".encode(), digest_size=8).digest(), "big") / 2**64
    if draw < split.heldout:
        return "train" if plain else "heldout"
    return "validation" if draw < split.heldout + split.validation else "train"


def contaminated(
    keys: Keys, rank: Index, signed: Callable[[Index], Signed], texts: Callable[[Index], Iterable[Texts]],
    settings: Dedup,
) -> Removals:  # fmt: skip
    """Which records ask what a record of a more protected side asks, exactly or nearly.

    Args:
        keys: of shape (rows, 2); equal where exactly the same is asked.
        rank: how protected each row's side is.
        signed: gives the signatures of what some rows ask.
        texts: gives what some rows ask as it is compared, in parts, in the rows' order.
        settings: the threshold and how candidates are found.
    """
    guard = first_of_each(keys, -rank)  # among equals in rank the first one: the order is stable
    exact = np.flatnonzero(rank[guard] > rank)
    out = np.zeros(len(rank), bool)
    out[exact] = True
    left = np.flatnonzero(~out)
    matched = lsh.matches(signed(left), lambda shared: texts(left[shared]), rank[left], settings)
    near = np.flatnonzero(matched.found >= 0)
    removals = Removals.of(exact, guard[exact], "exact", np.ones(len(exact)))
    return removals + Removals.of(left[near], left[matched.found[near]], "near", matched.similarity[near])
