"""A mixed delivery as real ones are: four formats row by row, near duplicates, and rows that nobody can use."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.benchmarks.documents import documents, english

DIRTY = 0.01
SPAM = "https://example.com/" + "offer/" * 40


def mixed(path: Path, megabytes: int, seed: int = 7) -> int:
    """Write a jsonl file of so many megabytes; returns its rows."""
    written = rows = 0
    with path.open("wb") as file:
        for line in _lines(seed):
            written += file.write(line)
            rows += 1
            if written >= megabytes * 10**6:
                break
    return rows


def _lines(seed: int) -> Iterator[bytes]:
    chooser = random.Random(seed)
    for number, (text, _) in enumerate(documents(1 << 40, english(seed), seed)):
        row = _row(number, text, chooser)
        line = json.dumps(row, ensure_ascii=False).encode()
        yield (line if chooser.random() > DIRTY else _spoilt(line, number, chooser)) + b"\n"


def _row(number: int, text: str, chooser: random.Random) -> dict[str, Any]:
    """A text cut into question and answer, in one of the formats; lines of a dozen words, as people write."""
    words = text.split()
    cut = len(words) // 4
    asked, answer = " ".join(words[:cut]), "\n".join(" ".join(words[at : at + 12]) for at in range(cut, len(words), 12))
    match chooser.randrange(4):
        case 0:
            return {"instruction": asked, "input": "", "output": answer}
        case 1:
            return {"conversations": [{"from": "human", "value": asked}, {"from": "gpt", "value": answer}]}
        case 2:
            turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
            return {"messages": turns, "user": f"u{number % 5000}"}
        case _:
            return {"prompt": asked, "completion": answer, "meta": {"number": number}}


def _spoilt(line: bytes, number: int, chooser: random.Random) -> bytes:
    """A line cut off, an answer that is missing, one that repeats itself, or a link and nothing else."""
    match chooser.randrange(4):
        case 0:
            return line[: len(line) // 2]
        case 1:
            return json.dumps({"instruction": f"number {number}"}).encode()
        case 2:
            return json.dumps({"prompt": f"number {number}", "completion": "again and again and " * 60}).encode()
        case _:
            return json.dumps({"prompt": f"number {number}", "completion": SPAM}).encode()
