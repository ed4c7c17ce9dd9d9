"""A stretch of a file: what a shard reads of one that is too big for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """A stretch of a plain jsonl file, from one line's start to another's: bytes, its first line's number, encoding."""

    start: int
    stop: int
    line: int
    encoding: str
