"""Answers as they come, one line each, so that a kill loses nothing that was asked.

The ledger belongs to one exam: its first line is the evaluation's fingerprint. Lines of another one, and a line that a
kill cut short, are passed over.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

from evaluator.server import Answer
from refit import files
from refit.job import JobRun
from refit.store import FileStore, join

NAME = "asked.jsonl"
UPLOAD_SECONDS = 15.0


class Ledger:
    """The answers of a job so far. On S3, which cannot append, a snapshot is uploaded every now and then."""

    def __init__(self, run: JobRun, fingerprint: str) -> None:
        self._path: Path = run.folder / NAME
        self._store, self._uri = run.store, join(run.job.output, NAME)
        self._uploads = not isinstance(run.store, FileStore)
        self._uploaded = time.monotonic()
        self.answers: dict[tuple[str, str], Answer] = {}
        if self._uploads and not self._path.exists() and self._store.exists(self._uri):
            files.write(self._path, self._store.read(self._uri))
        mine = False
        for line in self._path.read_text(encoding="utf-8").splitlines() if self._path.is_file() else []:
            try:
                record = json.loads(line)
                if "exam" in record:
                    mine = record["exam"] == fingerprint
                elif mine:
                    answer = Answer(**record)
                    self.answers[answer.key] = answer
            except (ValueError, TypeError):
                continue
        if not mine:
            self._append({"exam": fingerprint})

    def add(self, answer: Answer) -> None:
        """Keep an answer: it is on the disk when this returns."""
        self._append(asdict(answer))
        self.answers[answer.key] = answer
        if self._uploads and time.monotonic() - self._uploaded > UPLOAD_SECONDS:
            self.upload()

    def upload(self) -> None:
        """Put a snapshot where the next try finds it; nothing to do on a disk."""
        if self._uploads:
            self._store.write(self._uri, self._path.read_bytes())
            self._uploaded = time.monotonic()

    def _append(self, record: dict[str, object]) -> None:
        files.append(self._path, json.dumps(record).encode())
