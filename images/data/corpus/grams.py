"""The sets of hashed n-grams of some texts, and how similar two of them are: exactly, by Jaccard's measure.

Sets of many texts are more than the texts: beyond a gigabyte they lie in a file that has no name.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from corpus.jit import in_parts, kernel
from corpus.shingles import Bytes, Hashes, Offsets, Texts, shingle

Index = NDArray[np.int64]

IN_MEMORY = 1 << 27
"""So many hashed n-grams, a gigabyte, are held in memory; more are below TMPDIR."""


@dataclass(frozen=True)
class Sets:
    """The n-gram sets of some texts, sorted, without repeats: of text i, grams[start[i]:start[i] + size[i]]."""

    grams: Hashes
    start: Index
    size: Index

    def similarity(self, left: Index, right: Index) -> NDArray[np.float64]:
        """The exact similarity of pairs of those texts."""
        out = np.zeros(len(left), np.float64)
        for at, (i, j) in enumerate(zip(left, right, strict=True)):
            out[at] = jaccard(self.grams, self.start[i], self.size[i], self.start[j], self.size[j])
        return out


def sets_of(parts: Iterable[tuple[Texts, Index]], texts: Index, sizes: Index, ngram: int) -> Sets:
    """The sets of some of all texts.

    Args:
        parts: texts, and of each part the numbers in it of those that are wanted; together all of them, in their order.
        texts: the numbers of the wanted ones among all texts, rising.
        sizes: of all texts how many n-grams each has.
        ngram: words in an n-gram.

    Returns:
        Sets numbered as all texts are; those that were not wanted are empty.
    """
    rooms = sizes[texts] + ngram  # bounds the words of each
    start, size = np.cumsum(rooms) - rooms, np.zeros(len(rooms), np.int64)
    grams = _room(int(rooms.sum()))
    first = 0
    for part, own in parts:
        last = first + len(own)
        _fill_in_parts(part, own, ngram, Sets(grams, start[first:last], size[first:last]))
        first = last
    found = Sets(grams, np.zeros(len(sizes), np.int64), np.zeros(len(sizes), np.int64))
    found.start[texts], found.size[texts] = start, size
    return found


def _room(count: int) -> Hashes:
    """Room for so many hashes; in a file that has no name, mapped, where that is more than should be in memory."""
    if count <= IN_MEMORY:
        return np.empty(count, np.uint64)
    with tempfile.TemporaryFile() as file:
        os.posix_fallocate(file.fileno(), 0, 8 * count)  # a full disk is an error here, and a SIGBUS at some write
        return np.asarray(np.memmap(file, np.uint64, "r+", shape=(count,)))


def _fill_in_parts(texts: Texts, wanted: Index, n: int, sets: Sets) -> None:
    """Fill set i with text wanted[i]."""

    def fill(first: int, last: int) -> None:
        own = slice(first, last)
        _fill(texts.data, texts.offsets, wanted[own], n, sets.grams, sets.start[own], sets.size[own])

    in_parts(fill, len(wanted))


@kernel
def _fill(data: Bytes, offsets: Offsets, wanted: Index, n: int, grams: Hashes, start: Index, size: Index) -> None:
    for at in range(len(wanted)):
        text = wanted[at]
        place = grams[start[at] :]
        count = shingle(data, offsets[text], offsets[text + 1], n, place)
        sort_hashes(place, count)
        unique = 0
        for gram in range(count):
            if gram == 0 or place[gram] != place[gram - 1]:
                place[unique] = place[gram]
                unique += 1
        size[at] = unique


@kernel
def sort_hashes(values: Hashes, count: int) -> None:
    """Sort the first `count` of uniformly spread 64-bit values, in place.

    Each goes to a bucket by its upper bits, as many buckets as values; little is left to do. Equal or uneven values
    only make that part slower.
    """
    bits = 1
    while 1 << bits < count:
        bits += 1
    shift = np.uint64(64 - bits)
    ends = np.zeros((1 << bits) + 1, np.int64)
    for at in range(count):
        ends[np.int64(values[at] >> shift) + 1] += 1
    for bucket in range(1 << bits):
        ends[bucket + 1] += ends[bucket]
    spread = np.empty(count, np.uint64)
    for at in range(count):
        place = np.int64(values[at] >> shift)
        spread[ends[place]] = values[at]
        ends[place] += 1
    for at in range(count):
        value, to = spread[at], at
        while to > 0 and values[to - 1] > value:
            values[to] = values[to - 1]
            to -= 1
        values[to] = value


@kernel
def jaccard(grams: Hashes, i: int, i_size: int, j: int, j_size: int) -> float:
    """The similarity of two sets that begin at `i` and `j`; 0 of two empty ones."""
    both = 0
    a, b = i, j
    while a < i + i_size and b < j + j_size:
        if grams[a] == grams[b]:
            both += 1
            a += 1
            b += 1
        elif grams[a] < grams[b]:
            a += 1
        else:
            b += 1
    union = i_size + j_size - both
    return both / union if union else 0.0
