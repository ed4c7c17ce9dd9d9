"""A save under way, as one rank knows it."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from refit.errors import Infrastructure
from trainer.snapshot import Part


@dataclass
class Flight:
    """A save under way: what is written, the thread that does it, and how it ended."""

    number: int
    step: int
    kind: str
    facts: dict[str, Any]
    part: Part
    needed: int
    keep: frozenset[int]
    refused: bool
    began: float = field(default_factory=time.monotonic)
    stirred: float = field(default_factory=time.monotonic)
    """When it was last known to go on."""
    given_up: threading.Event = field(default_factory=threading.Event)
    folder: Path | None = None
    # Until it has ended well; of what nobody foresaw the traceback goes to the log.
    error: Exception | None = field(default_factory=lambda: Infrastructure("the thread that saves has crashed"))
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    thread: threading.Thread = field(init=False)

    @property
    def age(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.began

    @property
    def silence(self) -> float:
        """Seconds since it was last known to go on."""
        return time.monotonic() - self.stirred

    def stir(self) -> None:
        """It goes on."""
        self.stirred = time.monotonic()

    @property
    def ended(self) -> bool:
        """Whether this rank's thread has ended; on rank 0 without an error the checkpoint is there."""
        return not self.thread.is_alive()


class GivenUp(Exception):
    """A thread gave its part up because another rank's failed."""
