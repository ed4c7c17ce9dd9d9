"""Rows whose texts stay on disk: only where each lies is in memory, and a block of them is read when it is asked for.

The texts of plain jsonl lie in the files themselves, those of anything else in a file aside, in the order they came.
What is mapped counts as this process's memory for as long as its pages are there, so that each block's are given back.

What it does not do: guard against a file that is changed, or cut off, while it is read.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, Self, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from corpus import jsonl
from corpus.jsonl import Index, Stretch
from corpus.shingles import Bytes
from corpus.span import Span

BLOCK_BYTES = 8 << 20
ROWS = 8192
"""Of rows that go aside so many are a block at most."""

Rows = Iterable[tuple[str, str]]
Made = TypeVar("Made")


class Mapped:
    """A file's bytes, mapped; `let_go` takes a stretch of them out of this process's memory."""

    def __init__(self, path: Path | None) -> None:
        self._map: mmap.mmap | None = None
        if path is not None and path.stat().st_size:
            with path.open("rb") as handle:
                self._map = mmap.mmap(handle.fileno(), 0, prot=mmap.PROT_READ)
        self.data: Bytes = np.frombuffer(self._map, np.uint8) if self._map else np.zeros(0, np.uint8)

    def let_go(self, start: int, stop: int) -> None:
        """What is touched again comes back."""
        self._advise(mmap.MADV_DONTNEED, start, stop)

    def fetch(self, start: int, stop: int) -> None:
        """Have a stretch read from the disk in one go, not a page at a time as it is come upon."""
        self._advise(mmap.MADV_WILLNEED, start, stop)

    def _advise(self, what: int, start: int, stop: int) -> None:
        first = start - start % mmap.PAGESIZE
        if self._map and stop > first:
            self._map.madvise(what, first, stop - first)


NOWHERE = Mapped(None)


@dataclass(frozen=True)
class Block:
    """Rows that lie near each other in a file, as `jsonl.Stretch` tells; a start of -1 - n is n in the file aside."""

    file: Mapped
    ids: pa.StringArray
    start: Index
    width: Index
    size: Index


class Shelf:
    """Rows of an id and a text each. First all are added, then blocks of them are taken, as often as one likes."""

    def __init__(self, scratch: Path) -> None:
        self.blocks: list[Block] = []
        self._path = scratch
        self._writer: BinaryIO = scratch.open("wb")
        self._written = 0
        self._aside: Mapped | None = None

    def __len__(self) -> int:
        return sum(len(block.ids) for block in self.blocks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()

    @property
    def ids(self) -> pa.ChunkedArray:
        """Of all rows, a chunk a block."""
        return pa.chunked_array([block.ids for block in self.blocks], pa.string())

    def repeated_id(self) -> str | None:
        """An id that more than one row has. Hashes tell that there is none, in a fraction of the ids' own memory."""
        hashes = [np.empty(len(block.ids), np.uint64) for block in self.blocks]
        for block, out in zip(self.blocks, hashes, strict=True):
            _, offsets, data = block.ids.buffers()
            if data is not None:
                jsonl.hash_strings(np.frombuffer(data, np.uint8), np.frombuffer(offsets, np.int32), out)
        found = np.sort(np.concatenate(hashes))
        if not (found[1:] == found[:-1]).any():
            return None
        counts = pc.value_counts(self.ids)
        twice = counts.filter(pc.greater(counts.field("counts"), 1)).field("values")
        return str(twice[0].as_py()) if len(twice) else None

    def add_rows(self, rows: Rows) -> None:
        """Rows from anywhere: their texts go aside."""
        ids: list[str] = []
        places: list[tuple[int, int]] = []
        size = 0
        for name, text in rows:
            ids.append(name)
            places.append(self._put(text))
            size += places[-1][1] + len(name)
            if size >= BLOCK_BYTES or len(ids) == ROWS:
                self._add_aside(ids, places)
                ids, places, size = [], [], 0
        if ids:
            self._add_aside(ids, places)

    def add_lines(self, path: Path, read: Callable[[Span], Rows]) -> None:
        """Rows of a plain jsonl file in UTF-8; `read` gives those of the lines that the scanner leaves."""
        file = Mapped(path)

        def scan(edges: tuple[int, int]) -> Stretch:
            file.fetch(*edges)
            found = jsonl.scan(file.data, *edges)
            file.let_go(*edges)
            return found

        line = 1
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            for found in pool.map(scan, pairwise(_edges(file.data))):
                self._add_stretch(file, found, line, read)
                line += found.lines

    def texts(self, block: Block, rows: Index | None = None) -> pa.LargeStringArray:
        """The texts of a block, or of some of its rows."""
        chosen = np.arange(len(block.ids), dtype=np.int64) if rows is None else rows
        offsets = np.zeros(len(chosen) + 1, np.int64)
        np.cumsum(block.size[chosen], out=offsets[1:])
        room = pa.allocate_buffer(int(offsets[-1]))
        if self._aside is None:
            self._writer.flush()
            self._aside = Mapped(self._path)
        jsonl.take(
            block.file.data, self._aside.data, block.start, block.width, block.size, chosen, offsets,
            np.frombuffer(room, np.uint8),
        )  # fmt: skip
        _let_go(block, self._aside)
        return pa.LargeStringArray.from_buffers(len(chosen), pa.py_buffer(offsets), room)

    def picked(self, wanted: Index) -> Iterator[tuple[Block, Index]]:
        """The blocks, and which rows of each are among those of these numbers, which rise."""
        first = 0
        for block in self.blocks:
            last = first + len(block.ids)
            yield block, wanted[slice(*np.searchsorted(wanted, (first, last)))] - first
            first = last

    def _put(self, text: str) -> tuple[int, int]:
        """Where a text lies now, and its size."""
        data = text.encode()
        self._writer.write(data)
        self._written += len(data)
        return -1 - (self._written - len(data)), len(data)

    def _add_aside(self, ids: list[str], places: list[tuple[int, int]]) -> None:
        start, size = np.array(places, np.int64).reshape(-1, 2).T.copy()
        self.blocks.append(Block(NOWHERE, pa.array(ids, pa.string()), start, size, size))

    def _add_stretch(self, file: Mapped, found: Stretch, line: int, read: Callable[[Span], Rows]) -> None:
        """A stretch's rows, and those that a reader finds in the lines that were left, where these stand."""
        ids: list[str] = []
        places: list[tuple[int, int]] = []
        before: list[int] = []
        for odd in found.odd:
            for name, text in read(Span(odd.start, odd.stop, line + odd.line, "utf-8")):
                ids.append(name)
                places.append(self._put(text))
                before.append(odd.row)
        if not ids:
            self.blocks.append(Block(file, found.ids, found.start, found.width, found.size))
            return
        start, size = np.array(places, np.int64).T
        order = np.argsort(np.concatenate([np.arange(len(found.ids)), np.array(before) - 0.5]), kind="stable")
        names = pa.concat_arrays([found.ids, pa.array(ids, pa.string())]).take(pa.array(order))
        columns = ((found.start, start), (found.width, size), (found.size, size))
        self.blocks.append(Block(file, names, *(np.concatenate(pair)[order] for pair in columns)))


def _edges(data: Bytes) -> Iterator[int]:
    """Where the stretches of a file begin, each with a line, and where the last one ends."""
    at = 0
    yield at
    while at < len(data):
        at = jsonl.next_line(data, min(at + BLOCK_BYTES, len(data)) - 1)
        yield at


def _let_go(block: Block, aside: Mapped) -> None:
    end = block.start + block.width
    inside, outside = np.flatnonzero(block.start >= 0), np.flatnonzero(block.start < 0)
    if len(inside):
        block.file.let_go(block.start[inside[0]], end[inside[-1]])
    if len(outside):
        aside.let_go(-1 - block.start[outside[0]], -1 - block.start[outside[-1]] + block.size[outside[-1]])


def ahead(made: Iterator[Made]) -> Iterator[Made]:
    """The same, each one made while the one before is used."""
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(next, made, None)
        while (one := following.result()) is not None:
            following = pool.submit(next, made, None)
            yield one
