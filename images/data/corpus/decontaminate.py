"""`corpus decontaminate`: which rows of training files hold a row of an evaluation set.

What is asked of the evaluation counts (its prompt; its whole text where it has no answer), wherever it stands in a row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from corpus import formats, overlap, readers, record
from corpus.overlap import Index, Shares
from corpus.record import Bad
from corpus.shingles import Texts
from refit import files
from refit.errors import BadInput

QUESTIONS = ("question", "input", "query", "prompt", "text")
"""What a question is called where a row is of none of our formats (GSM8K, BIG-bench hard, banking77)."""
EXAMPLES = ("examples", "data", "instances", "rows")
FOUND, KEPT = "contaminated.parquet", "kept.parquet"


@dataclass(frozen=True)
class Gathered:
    """Texts with the places where they stand, and how many rows could not be read."""

    texts: list[str]
    files: list[str]
    lines: list[int]
    unread: int


def decontaminate(
    inputs: Sequence[Path], against: Sequence[Path], output: Path, *, ngram: int, threshold: float, min_words: int
) -> dict[str, Any]:
    """Look for every evaluation text in every row; write which rows hold one, and which places stay.

    Args:
        inputs: training files, of any format that the data stage reads.
        against: evaluation files.
        output: a folder; its files are replaced.
        ngram: words in an n-gram; shorter evaluation texts are looked for whole.
        threshold: share of an evaluation text's n-grams that a row must have to hold it.
        min_words: evaluation texts of fewer words are passed over: they are in everything.

    Raises:
        BadInput: a file is missing, or there is nothing to compare.
    """
    started = time.perf_counter()
    asked, said = gather(against, question), gather(inputs, everything)
    for found, paths in ((asked, against), (said, inputs)):
        if not found.texts:
            raise BadInput(f"{', '.join(map(str, paths))}: holds no text that can be read.")
    guarded = overlap.Guarded.of(Texts.of(asked.texts), ngram, min_words)
    held, share = overlap.held(Texts.of(said.texts), guarded)
    places = pa.table({"file": said.files, "line": said.lines})
    is_held = (held >= 0) & (share >= threshold)
    rows = np.flatnonzero(is_held)
    output.mkdir(parents=True, exist_ok=True)
    _write(output / FOUND, with_evaluation(places.take(pa.array(rows)), asked, held[rows], share[rows]))
    _write(output / KEPT, places.filter(pa.array(~is_held)))
    return {
        "documents": places.num_rows,
        "kept": places.num_rows - len(rows),
        "contaminated": len(rows),
        "evaluation_texts": len(asked.texts),
        "too_short": len(guarded.short),
        "unread": asked.unread + said.unread,
        "seconds": time.perf_counter() - started,
    }


def with_evaluation(rows: pa.Table, asked: Gathered, held: Index, share: Shares) -> pa.Table:
    """Rows with the evaluation text that each holds: its file and line, how much of it, and a sample."""
    numbers = held.tolist()
    columns = {
        "evaluation": [asked.files[number] for number in numbers],
        "evaluation_line": [asked.lines[number] for number in numbers],
        "share": share.tolist(),
        "sample": [asked.texts[number][:200] for number in numbers],
    }
    for name, values in columns.items():
        rows = rows.append_column(pa.field(name, _TYPES[name]), pa.array(values, _TYPES[name]))
    return rows


_TYPES = {"evaluation": pa.string(), "evaluation_line": pa.int64(), "share": pa.float64(), "sample": pa.string()}


def gather(paths: Iterable[Path], text_of: Callable[[Any], str]) -> Gathered:
    """The texts of all rows of some files.

    Raises:
        BadInput: a file is missing.
    """
    gathered = Gathered([], [], [], 0)
    unread = 0
    for path in paths:
        if not path.is_file():
            raise BadInput(f"{path}: there is no such file.")
        for line, row in _rows(path):
            text = "" if isinstance(row, readers.Fault) else text_of(row)
            if not text.strip():
                unread += 1
                continue
            gathered.texts.append(text.encode("utf-8", "replace").decode())
            gathered.files.append(path.name)
            gathered.lines.append(line)
    return replace(gathered, unread=unread)


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    """The rows of a file; of one object around a list of examples (as BIG-bench has them) those."""
    for line, row in readers.read(path, path.name):
        examples = next((row[key] for key in EXAMPLES if key in row), None) if isinstance(row, dict) else None
        if isinstance(examples, list) and all(isinstance(example, dict) for example in examples):
            yield from enumerate(examples, start=1)
        else:
            yield line, row


def question(row: Any) -> str:
    """What an evaluation row asks; everything in it where that cannot be told."""
    try:
        return record.prompt(formats.conversation(row, "auto", {}))
    except Bad:
        keys = [key for key in QUESTIONS if isinstance(row, dict) and isinstance(row.get(key), str)]
        return str(row[keys[0]]) if keys else everything(row)


def everything(row: Any) -> str:
    """Every string in a row."""
    if isinstance(row, str):
        return row
    if isinstance(row, dict):
        return "\n".join(filter(None, map(everything, row.values())))
    return "\n".join(filter(None, map(everything, row))) if isinstance(row, list) else ""


def _write(path: Path, table: pa.Table) -> None:
    with files.replacing(path) as draft:
        record.write(draft, table)
