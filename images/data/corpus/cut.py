"""A source as shards: whole files, several small ones together, a big jsonl file in stretches of lines.

Where the cuts are follows from the data alone: as many machines as like share the shards out, and the result is the
same. A file that grows at its end keeps its earlier stretches, and with them everything that was made of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from corpus.encodings import SAMPLE_BYTES, detect, is_by_line
from corpus.readers import MAGIC, unpacked
from corpus.span import Span

SHARD_BYTES = 64 << 20
"""A shard holds about so much of plain text: some seconds of work, and a bound for what a worker has in memory."""
BLOCK = 1 << 20
# So many times its size a packed file is taken to be.
PACKED = 5


@dataclass(frozen=True)
class Slice:
    """A file, or a stretch of one: what it counts as, about how much text it has, and how it comes to this machine."""

    file: str
    digest: str
    size: int
    fetch: Callable[[], Path]
    span: Span | None = None

    @property
    def role(self) -> str:
        """What the slice is called among the inputs of its shard: a name of its own, the same on every machine."""
        return f"{self.file}@{self.span.line}" if self.span else self.file


def slices(file: str, path: Path) -> Iterator[Slice]:
    """A file in stretches of about `SHARD_BYTES`, where it is one of lines; else whole."""
    encoding = _of_lines(file, path)
    if encoding is None or path.stat().st_size <= SHARD_BYTES:
        with path.open("rb") as handle:
            packed = PACKED if _is_packed(handle.read(8)) else 1
            handle.seek(0)
            digest = hashlib.file_digest(handle, "sha256").hexdigest()
            yield Slice(file, digest, path.stat().st_size * packed, partial(Path, path))
        return
    line = 1
    with path.open("rb") as handle:
        start = 0
        while found := _stretch(handle.read, handle.readline):
            digest, size, lines = found
            # The encoding is told by the file's beginning: with another one the same bytes further on say other things.
            yield Slice(
                file, f"{digest}-{encoding}", size, partial(Path, path), Span(start, start + size, line, encoding)
            )
            start, line = start + size, line + lines


def shared_out(found: list[Slice]) -> Iterator[list[Slice]]:
    """Slices in shards, in their order: small ones together until there is enough for a shard."""
    shard: list[Slice] = []
    size = 0
    for one in found:
        if shard and size + one.size > SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append(one)
        size += one.size
    if shard:
        yield shard


def _stretch(read: Callable[[int], bytes], readline: Callable[[int], bytes]) -> tuple[str, int, int] | None:
    """Digest, bytes and lines of the next stretch; it ends with the line in which it is full."""
    digest, size, lines = hashlib.sha256(), 0, 0
    last = b""
    while size < SHARD_BYTES and (block := read(min(BLOCK, SHARD_BYTES - size))):
        digest.update(block)
        size, lines, last = size + len(block), lines + block.count(b"\n"), block[-1:]
    while last and last != b"\n" and (rest := readline(BLOCK)):
        digest.update(rest)
        size, lines, last = size + len(rest), lines + rest.count(b"\n"), rest[-1:]
    return (digest.hexdigest(), size, lines) if size else None


def _of_lines(file: str, path: Path) -> str | None:
    """The encoding of a plain jsonl file; None where a file is packed, of another kind, or not cut by line feeds."""
    if not unpacked(file).endswith((".jsonl", ".json")):
        return None
    with path.open("rb") as handle:
        start = handle.read(SAMPLE_BYTES)
    encoding = detect(start)
    if _is_packed(start) or not is_by_line(encoding) or b"\0" in start[:64]:
        return None
    return None if start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[" else encoding


def _is_packed(start: bytes) -> bool:
    return any(start.startswith(magic) for magic in (*MAGIC, b"PAR1", b"ARROW1"))
