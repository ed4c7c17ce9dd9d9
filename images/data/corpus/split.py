"""Phase 4, split and decontaminate: who is trained on, watched and held out; and nothing is on two sides.

The side follows from a hash of the session, or of what is asked where there is no session: a record keeps its side
when data grows, and people's sessions are never cut in two. Then whatever is asked of training that is the same as, or
near to, what is asked of the other sides is removed, so that an exam is no memory test; and so is what holds a question
of the evaluation sets in `data.decontaminate`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from corpus import lsh, overlap, record, removed, text
from corpus.decontaminate import gather, question, with_evaluation
from corpus.removed import Removal
from corpus.settings import SplitSettings
from corpus.shingles import Texts
from corpus.sources import EVALUATION
from corpus.task import RECORDS, REMOVED, Facts, Task
from refit.spec import Dedup, Split

CONTAMINATED = "contaminated.parquet"
# In the order of protection: what is near to a later side is removed from an earlier one.
SIDES = ("train", "validation", "heldout")


def run(task: Task) -> Facts:
    """Give every record its side, and remove what would be on two."""
    settings: SplitSettings = task.settings
    table = record.read(task.inputs["records"] / RECORDS)
    conversations = [record.load(messages) for messages in table.column("messages").to_pylist()]
    asked = [text.lines(record.prompt(messages)) for messages in conversations]
    sessions, sources = table.column("session").to_pylist(), table.column("source").to_pylist()
    sides = [
        "train"
        if source in settings.rehearsal
        else side(settings.split, session, text.key(question), plain=messages[0]["role"] == record.TEXT)
        for source, session, question, messages in zip(sources, sessions, asked, conversations, strict=True)
    ]
    table = table.append_column("split", pa.array(sides, pa.string()))
    task.progress(table.num_rows // 3, table.num_rows)
    removals = contaminated(asked, sources, np.array([SIDES.index(name) for name in sides], np.int64), settings.dedup)
    evaluation = [path for role, path in task.inputs.items() if role.startswith(f"{EVALUATION}/")]
    held = holding(evaluation, table, settings, task.folder / CONTAMINATED)
    kept = removed.take_out(table, removals, task.folder / REMOVED, besides=held)
    record.write(task.folder / RECORDS, kept)
    counts = Counter(kept.column("split").to_pylist())
    return {
        "records_in": table.num_rows,
        "records_out": kept.num_rows,
        "quarantined": 0,
        "removed": {**removed.counted(removals), "evaluation": len(held)},
        "sides": {name: counts[name] for name in SIDES},
    }


def holding(evaluation: Sequence[Path], table: pa.Table, settings: SplitSettings, path: Path) -> set[int]:
    """Training rows that hold a question of an evaluation set; writes down which one, and how much of it."""
    if not evaluation:
        return set()
    asked = gather(evaluation, question)
    conversations = [record.load(messages) for messages in table.column("messages").to_pylist()]
    said = Texts.of(["\n".join(message["content"] for message in messages) for messages in conversations])
    guarded = overlap.Guarded.of(Texts.of(asked.texts), settings.ngram, settings.min_words)
    found, share = overlap.held(said, guarded)
    training = np.array([name == "train" for name in table.column("split").to_pylist()], bool)
    rows = np.flatnonzero(training & (found >= 0) & (share >= settings.threshold))
    listed = table.select(["id", "source", "file", "line"]).take(pa.array(rows))
    record.write(path, with_evaluation(listed, asked, found[rows], share[rows]))
    return set(rows.tolist())


def side(split: Split, session: str | None, question: str, *, plain: bool = False) -> str:
    """The side of a record. A plain text cannot be asked, so it is never held out."""
    unit = f"session\0{session}" if session is not None else f"question\0{question}"
    draw = int.from_bytes(hashlib.blake2b(f"{split.salt}\0{unit}".encode(), digest_size=8).digest(), "big") / 2**64
    if draw < split.heldout:
        return "train" if plain else "heldout"
    return "validation" if draw < split.heldout + split.validation else "train"


def contaminated(asked: list[str], sources: list[str], rank: np.ndarray, settings: Dedup) -> list[Removal]:
    """Which records ask what a record of a more protected side asks, exactly or nearly."""
    keys = [question.replace("\n", " ") for question in asked]
    guard: dict[str, int] = {}
    for row in np.argsort(-rank, kind="stable").tolist():
        guard.setdefault(keys[row], row)
    removals = [Removal(row, guard[key], "exact", 1.0) for row, key in enumerate(keys) if rank[guard[key]] > rank[row]]
    out = {removal.row for removal in removals}
    left = np.array([row for row in range(len(asked)) if row not in out], np.int64)
    own = [Texts.of(text.distinctive([asked[row] for row in left], [sources[row] for row in left]))]
    found = lsh.matches(own, rank[left], settings)
    gone = np.flatnonzero(found >= 0)
    near = lsh.similarity(own, gone, found[gone], settings.ngram)
    for i, share in zip(gone.tolist(), near.tolist(), strict=True):
        removals.append(Removal(int(left[i]), int(left[found[i]]), "near", share))
    return removals
