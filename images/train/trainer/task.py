"""What a rank is told (`Task`) and what it tells its launcher (`Wire`)."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from refit.errors import RefitError
from refit.job import Job
from refit.spec import Train
from trainer.machine import Arithmetic
from trainer.position import Data

Mode = Literal["train", "overfit", "smoke", "trial", "replay", "export", "early"]

BEAT = "beat"
"""The kind of a message that is a sign of life and nothing else."""

WIRE = "REFIT_WIRE"
"""The environment variable with the number of the file descriptor that leads to the launcher."""


class Task(BaseModel):
    """The work of all ranks of one launch. `checkpoint` is the URI to go on from, `token` the writer's,
    `until` the finished steps before the one that a replay takes again, `data` what checkpoints say of the dataset."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Mode
    job: Job
    fingerprint: str
    dataset: Path
    base: Path
    base_digest: str = ""
    data: Data | None = None
    folder: Path
    dtype: Arithmetic
    token: str
    ranks: int
    rendezvous: Path
    checkpoint: str | None = None
    step: int = 0
    until: int = 0

    @property
    def train(self) -> Train:
        """The recipe."""
        return self.job.spec.train

    @property
    def export(self) -> Path:
        """Where rank 0 puts what is to be published."""
        return self.folder / "export"


class Wire:
    """JSON lines from a rank to its launcher. Every line is a sign of life too, and an empty one nothing else; the
    wire's end is the rank's end."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()  # a thread may speak beside the rank's own

    @classmethod
    def from_environment(cls) -> Wire:
        """The wire that the launcher gave us; none when a rank is started by hand."""
        number = os.environ.get(WIRE)
        return cls(int(number) if number else None)

    def send(self, kind: str, **fields: Any) -> None:
        """Tell the launcher something."""
        self._write(json.dumps({"kind": kind, **fields}).encode() + b"\n")

    def beat(self) -> None:
        """Give a sign of life."""
        self._write(b"\n")

    def error(self, error: RefitError) -> None:
        """Tell why this rank ends."""
        self.send("error", exit_code=error.exit_code, message=str(error)[:3000])

    def _write(self, line: bytes) -> None:
        if self._descriptor is not None:
            with self._lock:
                os.write(self._descriptor, line)


def heard(line: bytes) -> dict[str, Any]:
    """What a line of a wire says: its `kind`, and what belongs to that."""
    message: dict[str, Any] = json.loads(line) if line else {"kind": BEAT}
    return message
