"""Feedback is on our disk before we say thank you, and in Postgres as soon as it answers.

POST → spool/feedback.jsonl (append, fsync) → 202      the recorder's loop: spool → Postgres, at least once, by key
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

FILE_BYTES = 16 << 20


class Feedback(BaseModel):
    """Whether one answer helped, by the id of its request."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    request_id: Annotated[str, Field(min_length=1, max_length=200)]
    resolved: bool


class FeedbackSpool:
    """The file that feedback waits in."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()

    def add(self, events: Iterable[Feedback]) -> int:
        """Keep events; on return they survive a power cut. Returns how many there were."""
        now = time.time()
        lines = [json.dumps({**event.model_dump(), "at": now}).encode() + b"\n" for event in events]
        with self._lock:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                size = os.fstat(descriptor).st_size
                if size and os.pread(descriptor, 1, size - 1) != b"\n":
                    os.write(descriptor, b"\n")  # a kill cut the last line short; it was not acknowledged
                data = b"".join(lines)
                while data:
                    data = data[os.write(descriptor, data) :]
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        return len(lines)

    def rotate(self) -> None:
        """Begin a new file where this one is large and the one before is read (and gone)."""
        rotated = self.path.with_name(self.path.name + ".1")
        with self._lock:
            if self.path.exists() and self.path.stat().st_size > FILE_BYTES and not rotated.exists():
                os.replace(self.path, rotated)


def rows(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """The rows of spooled lines."""
    found = []
    for line in lines:
        try:
            entry = json.loads(line)
            found.append({"request_id": entry["request_id"], "resolved": bool(entry["resolved"]), "at": entry["at"]})
        except (ValueError, KeyError, TypeError):
            continue
    return found
