"""One phase's work: what it may read, where it writes, and how it says how far it is.

A phase is a module with one function, `run(task) -> facts`. It reads `settings` and `inputs`, writes files below
`folder`, and returns what there is to tell: always records_in, records_out and quarantined, then what it likes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from corpus.span import Span

Facts = dict[str, Any]
Report = Callable[[int, int], None]

Kind = Literal["said", "asked"]
"""Of what a record says: everything, or only what is asked, which is all but the last answer."""

SHARDS = "shards.json"
RECORDS = "records.parquet"
TEXTS = "texts.parquet"
LINES = "lines.parquet"
QUARANTINE = "quarantine.parquet"
REMOVED = "removed.parquet"
EVALUATION = "evaluation"
"""What the roles of the evaluation sets among the inputs begin with."""


def form_file(source: str, kind: Kind) -> str:
    """Where clean's own folder has the lines that a source's texts of a kind share (`corpus.said`)."""
    return f"forms/{kind}/{source}.json"


def silent(done: int, total: int) -> None:
    """Tell nobody."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A phase to run, or a shard of one: what is not here cannot decide the bytes.

    `inputs` are folders (of ingest: files) by role; `spans` the stretches of those files that are not read whole;
    `shards` the folders of an input that is in shards, in their order.
    """

    settings: Any
    inputs: Mapping[str, Path]
    spans: Mapping[str, Span] = field(default_factory=dict)
    shards: Mapping[str, Sequence[Path]] = field(default_factory=dict)
    folder: Path
    report: Report = silent
    pause: float = 0.5
    _said: list[float] = field(default_factory=lambda: [0.0])

    def progress(self, done: int, total: int) -> None:
        """Say how many of how many records are done; told on at most every `pause` seconds."""
        now = time.monotonic()
        if now - self._said[0] >= self.pause:
            self._said[0] = now
            self.report(done, total)
