"""What a person sees while something takes long."""

from __future__ import annotations

import sys
import time
from pathlib import Path


class Progress:
    """A line a step on stderr, with the seconds since the beginning."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self._start

    def say(self, text: str) -> None:
        """One line."""
        print(f"{self.seconds:6.1f} s  {text}", file=sys.stderr, flush=True)


def last_words(log: Path) -> str:
    """The end of a message about a program that failed: its last line, and where the rest is."""
    try:
        lines = [
            line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()
        ]
    except OSError:
        lines = []
    return f"its last line: {lines[-1][:300]}; log: {log}" if lines else f"it wrote nothing; log: {log}"
