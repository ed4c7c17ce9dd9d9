"""metrics.jsonl: one object a step, each step once, whatever was killed in between.

Known limit: on a disk that two machines share, a rank of one that was thought dead has the same file open, and adds its
steps to it until its next save, where it sees that the output is another's.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from refit import files
from refit.job import read_events
from refit.store import FileStore, join, store_for

METRICS = "metrics.jsonl"

TAIL_BYTES = 64 << 10
"""What `Tail` reads of the end of a file: some two hundred steps."""

BLOCK = 64 << 10
"""Bytes that are read at a time where a file is read from its end."""


def append(folder: Path, record: dict[str, Any]) -> None:
    """Add a step's record."""
    files.append(folder / METRICS, json.dumps(record).encode())


@contextmanager
def appending(folder: Path) -> Iterator[Callable[[dict[str, Any]], None]]:
    """`append` for many steps, to a file that is opened once."""
    with files.Lines(folder / METRICS) as lines:
        yield lambda record: lines.append(json.dumps(record).encode())


def read(folder: Path) -> list[dict[str, Any]]:
    """Every whole record, in order of writing."""
    path = folder / METRICS
    return read_events(path.read_text(encoding="utf-8")) if path.is_file() else []


def last(folder: Path, count: int) -> list[dict[str, Any]]:
    """The last `count` whole records, in order of writing; no more of the file is read than they take."""
    path = folder / METRICS
    if not path.is_file():
        return []
    with path.open("rb") as handle:
        return [record for record, _ in islice(_backwards(handle), count)][::-1]


def rewind(folder: Path, step: int) -> None:
    """Forget the steps after `step`: they are about to be made again.

    The file is cut after the record of `step`, in one go and in place: it takes as long as what is forgotten, however
    far the training has come, and whoever reads it meanwhile, or after a kill, finds its first steps.
    """
    path = folder / METRICS
    if not path.is_file():
        return
    with path.open("r+b") as handle:
        handle.truncate(next((end for record, end in _backwards(handle) if record["step"] <= step), 0))
        os.fsync(handle.fileno())


def _backwards(handle: BinaryIO) -> Iterator[tuple[dict[str, Any], int]]:
    """Each whole record with the offset at which its line ends, the last one first."""
    size = start = handle.seek(0, os.SEEK_END)
    end, rest = size, b""  # where the line before ends; what is known of that in which the last block began
    while start > 0:
        block = min(BLOCK, start)
        start = handle.seek(start - block)
        first, *lines = (handle.read(block) + rest).split(b"\n")
        lines, rest = ([first, *lines], b"") if start == 0 else (lines, first)
        for line in reversed(lines):
            for record in _records(line):
                yield record, min(size, end + 1)
            end -= len(line) + 1


def amend(folder: Path, record: dict[str, Any]) -> None:
    """Put a record in the place of the last one, which is of the same step."""
    before, last = (folder / METRICS).read_bytes().splitlines(keepends=True)[:-1], json.dumps(record).encode() + b"\n"
    files.write(folder / METRICS, b"".join([*before, last]))


def upload(folder: Path, output: str) -> None:
    """Where the output is not this folder itself, put a copy there: with each checkpoint, so that a resume has it."""
    store = store_for(output)
    if not isinstance(store, FileStore) and (folder / METRICS).is_file():
        store.write(join(output, METRICS), (folder / METRICS).read_bytes())


def download(folder: Path, output: str, step: int) -> None:
    """Get what other machines have uploaded, where this one knows less than the steps up to `step` by itself."""
    store, uri = store_for(output), join(output, METRICS)
    here = next((record["step"] for record in last(folder, 1)), 0)
    if isinstance(store, FileStore) or here >= step or not store.exists(uri):
        return
    data = store.read(uri)
    there = next((record["step"] for record, _ in _backwards(io.BytesIO(data))), 0)
    if there > here:  # else our own last upload has failed
        files.write(folder / METRICS, data)


class Tail:
    """The last steps that the store knows of, for who looks on; a line cut short at either end is passed over.

    On S3 they are those of the newest checkpoint, with which they are uploaded; they are fetched when they changed.
    """

    def __init__(self, output: str) -> None:
        self._uri = join(output, METRICS)
        self._store = store_for(output)
        self._known: tuple[float, list[dict[str, Any]]] | None = None

    def read(self) -> list[dict[str, Any]]:
        """The records now; none before the first step."""
        try:
            return self._of_disk(self._store) if isinstance(self._store, FileStore) else self._fetched()
        except FileNotFoundError:
            return []

    def _of_disk(self, store: FileStore) -> list[dict[str, Any]]:
        with store.path(self._uri).open("rb") as handle:
            handle.seek(max(0, handle.seek(0, os.SEEK_END) - TAIL_BYTES))
            return _records(handle.read())

    def _fetched(self) -> list[dict[str, Any]]:
        modified = self._store.modified(self._uri)
        if self._known is None or self._known[0] != modified:
            self._known = modified, _records(self._store.read(self._uri)[-TAIL_BYTES:])
        return self._known[1]


def _records(data: bytes) -> list[dict[str, Any]]:
    return [record for record in read_events(data.decode(errors="replace")) if "step" in record]
