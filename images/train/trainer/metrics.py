"""metrics.jsonl: one object a step, each step once, whatever was killed in between."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from refit import files
from refit.job import read_events
from refit.store import FileStore, join, store_for

METRICS = "metrics.jsonl"


def append(folder: Path, record: dict[str, Any]) -> None:
    """Add a step's record."""
    files.append(folder / METRICS, json.dumps(record).encode())


def read(folder: Path) -> list[dict[str, Any]]:
    """Every whole record, in order of writing."""
    path = folder / METRICS
    return read_events(path.read_text(encoding="utf-8")) if path.is_file() else []


def rewind(folder: Path, step: int) -> None:
    """Forget the steps after `step`: they are about to be made again."""
    kept = [record for record in read(folder) if record["step"] <= step]
    files.write(folder / METRICS, b"".join(json.dumps(record).encode() + b"\n" for record in kept))


def upload(folder: Path, output: str) -> None:
    """Where the output is not this folder itself, put a copy there: with each checkpoint, so that a resume has it."""
    store = store_for(output)
    if not isinstance(store, FileStore) and (folder / METRICS).is_file():
        store.write(join(output, METRICS), (folder / METRICS).read_bytes())


def download(folder: Path, output: str) -> None:
    """On a machine that has not worked on this output yet, get what an earlier one uploaded."""
    store = store_for(output)
    if not (folder / METRICS).is_file() and store.exists(join(output, METRICS)):
        files.write(folder / METRICS, store.read(join(output, METRICS)))
