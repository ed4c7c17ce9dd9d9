"""Near duplicates: MinHash bands propose pairs, the exact Jaccard similarity of their n-gram sets decides.

Two texts are a candidate pair when one of `bands` bands of `rows` signature values is equal. Every candidate is
verified, so a set that is merely contained in a bigger one, or a template that differs in a number, is no duplicate
unless the similarity says so. The result depends on the texts, never on their order.

Source: Leskovec, Rajaraman, Ullman, Mining of Massive Datasets, chapter 3.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from corpus.jit import in_parts, kernel
from corpus.minhash import Signed, signed
from corpus.shingles import Bytes, Hashes, Offsets, Texts, shingle
from refit.spec import Dedup

Index = NDArray[np.int64]
Pick = Callable[[Index], Iterable[Texts]]
"""Gives the texts of these numbers, which rise, in parts."""

GRAMS_IN_MEMORY = 1 << 27
"""So many hashed n-grams, a gigabyte, are held in memory; more are below TMPDIR."""
BANDS_AT_ONCE = 4
"""A band at work takes some fifty bytes a text: not one a core, where there are many."""


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
            out[at] = _jaccard(self.grams, self.start[i], self.size[i], self.start[j], self.size[j])
        return out


@dataclass(frozen=True)
class Clusters:
    """`root[i]` is the lowest number of the texts that text i is connected with by verified pairs.

    `sets` has every text that shares a band's key with another one: all of a cluster's.
    """

    root: Index
    candidate_pairs: int
    verified_pairs: int
    sets: Sets


@dataclass(frozen=True)
class Matches:
    """`found[i]` is a text of a higher rank that text i is near to; -1 where there is none."""

    found: Index
    sets: Sets


@dataclass(frozen=True)
class _Shared:
    """The texts that share a band's key with another: by band as `_bucket` gives them, and all of them, rising."""

    sizes: Index
    buckets: list[tuple[Index, Index]]
    texts: Index


def clusters(parts: Iterable[Texts], settings: Dedup, pick: Pick | None = None) -> Clusters:
    """Texts, numbered on through all parts, connected by pairs whose similarity is at least the threshold.

    `parts` is gone through twice, one part at a time: it may read each anew. With `pick` only once: the second time few
    of the texts are looked at, and it gives these alone.
    """
    shared = _share(_signed(parts, settings))  # the keys are let go here
    picked = _whole(pick(shared.texts)) if pick else _those(parts, shared.texts)
    return _linked(shared, _sets(picked, shared, settings.ngram), settings.threshold)


def clusters_of(given: Signed, pick: Pick, settings: Dedup) -> Clusters:
    """As `clusters`, of texts that are signed; those that share a band's key with another are picked, once."""
    shared = _share(given)
    return _linked(shared, _sets(_whole(pick(shared.texts)), shared, settings.ngram), settings.threshold)


def matches(parts: Iterable[Texts], rank: NDArray[np.int64], settings: Dedup) -> Matches:
    """For each text a text of a higher rank that it is near to. `parts` as in `clusters`."""
    shared = _share(_signed(parts, settings))
    sets = _sets(_those(parts, shared.texts), shared, settings.ngram)
    found = np.full(len(rank), -1, np.int64)
    for order, edges in shared.buckets:
        _match(order, edges, sets.grams, sets.start, sets.size, settings.threshold, rank, found)
    return Matches(found, sets)


def _signed(parts: Iterable[Texts], chosen: Dedup) -> Signed:
    return signed(parts, ngram=chosen.ngram, bands=chosen.bands, rows=chosen.rows, seed=chosen.seed)


def _share(given: Signed) -> _Shared:
    """Find the texts that share a band's key with another."""

    def bucket(number: int) -> tuple[Index, Index]:
        return _bucket(given.band(number), given.sizes)

    with ThreadPoolExecutor(min(BANDS_AT_ONCE, len(os.sched_getaffinity(0)))) as pool:
        buckets = list(pool.map(bucket, range(given.bands)))
    shared = np.zeros(len(given.sizes), bool)
    for order, _ in buckets:
        shared[order] = True
    return _Shared(given.sizes, buckets, np.flatnonzero(shared))


def _linked(shared: _Shared, sets: Sets, threshold: float) -> Clusters:
    """Verify the candidates, and connect them."""
    root = np.arange(len(shared.sizes), dtype=np.int64)
    tried = verified = 0
    for order, edges in shared.buckets:
        more_tried, more_verified = _link(order, edges, sets.grams, sets.start, sets.size, threshold, root)
        tried, verified = tried + more_tried, verified + more_verified
    _settle(root)
    return Clusters(root, tried, verified, sets)


def _bucket(band: Hashes, sizes: Index) -> tuple[Index, Index]:
    """Texts whose key another has, those of one key side by side, and (first, last) of each such run.

    Few keys occur twice: a bitmap finds those that may, so that only they are sorted.
    """
    bits = max(16, len(band).bit_length() + 6)
    once, twice = (np.zeros(1 << (bits - 6), np.uint64) for _ in range(2))
    again = np.zeros(len(band), np.bool_)
    _may_be_repeated(band, sizes, np.uint64(64 - bits), once, twice, again)
    texts = np.flatnonzero(again)
    repeated = band[texts]
    order = np.argsort(repeated)
    sorted_keys = repeated[order]
    new = np.flatnonzero(sorted_keys[1:] != sorted_keys[:-1]) + 1
    first, last = np.concatenate([[0], new]), np.concatenate([new, [len(repeated)]])
    several = last - first > 1
    length = (last - first)[several]
    ends = np.cumsum(length)
    edges = np.stack([ends - length, ends], axis=1).astype(np.int64)
    found = texts[order[np.repeat(several, last - first)]]
    # Which of equal keys a sort puts first is its own affair; what we tell of the work must not depend on it.
    return found[np.lexsort((found, np.repeat(np.arange(len(length)), length)))], edges


def _whole(parts: Iterable[Texts]) -> Iterator[tuple[Texts, Index]]:
    return ((texts, np.arange(len(texts))) for texts in parts)


def _those(parts: Iterable[Texts], wanted: Index) -> Iterator[tuple[Texts, Index]]:
    """Each part, with the numbers that those of the wanted texts have in it which it holds; `wanted` rises."""
    first = 0
    for texts in parts if len(wanted) else ():
        last = first + len(texts)
        yield texts, wanted[slice(*np.searchsorted(wanted, (first, last)))] - first
        first = last


def _sets(parts: Iterable[tuple[Texts, Index]], shared: _Shared, ngram: int) -> Sets:
    """The sets of the shared texts: of each part those of the given numbers in it, which together are all of them."""
    rooms = shared.sizes[shared.texts] + ngram  # bounds the words of each
    start, size = np.cumsum(rooms) - rooms, np.zeros(len(rooms), np.int64)
    grams = _room(int(rooms.sum()))
    first = 0
    for texts, own in parts:
        last = first + len(own)
        _fill_in_parts(texts, own, ngram, Sets(grams, start[first:last], size[first:last]))
        first = last
    found = Sets(grams, np.zeros(len(shared.sizes), np.int64), np.zeros(len(shared.sizes), np.int64))
    found.start[shared.texts], found.size[shared.texts] = start, size
    return found


def _room(count: int) -> Hashes:
    """Room for so many hashes; in a file that has no name, mapped, where that is more than should be in memory."""
    if count <= GRAMS_IN_MEMORY:
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
def _may_be_repeated(
    keys: Hashes, sizes: Index, shift: np.uint64, once: Hashes, twice: Hashes, again: NDArray[np.bool_]
) -> None:
    for at in range(len(keys)):
        if sizes[at]:
            place = keys[at] >> shift
            word, bit = place >> np.uint64(6), np.uint64(1) << (place & np.uint64(63))
            twice[word] |= once[word] & bit
            once[word] |= bit
    for at in range(len(keys)):
        if sizes[at]:
            place = keys[at] >> shift
            again[at] = twice[place >> np.uint64(6)] >> (place & np.uint64(63)) & np.uint64(1)


@kernel
def _jaccard(grams: Hashes, i: int, i_size: int, j: int, j_size: int) -> float:
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


@kernel
def _root(root: Index, text: int) -> int:
    while root[text] != text:
        root[text] = root[root[text]]
        text = root[text]
    return text


@kernel
def _settle(root: Index) -> None:
    """Links point downwards, so one pass from below finds every root."""
    for text in range(len(root)):
        root[text] = root[root[text]]


@kernel
def _link(
    order: Index, edges: Index, grams: Hashes, start: Index, size: Index, threshold: float, root: Index
) -> tuple[int, int]:
    tried = verified = 0
    for run in range(len(edges)):
        for at in range(edges[run, 0], edges[run, 1]):
            i = order[at]
            for other in range(at + 1, edges[run, 1]):
                j = order[other]
                left, right = _root(root, i), _root(root, j)
                if left == right:
                    continue  # connected already: another pair cannot change the outcome
                tried += 1
                if _jaccard(grams, start[i], size[i], start[j], size[j]) >= threshold:
                    verified += 1
                    root[max(left, right)] = min(left, right)
    return tried, verified


@kernel
def _match(
    order: Index, edges: Index, grams: Hashes, start: Index, size: Index, threshold: float, rank: Index, found: Index
) -> None:
    for run in range(len(edges)):
        for at in range(edges[run, 0], edges[run, 1]):
            i = order[at]
            if found[i] >= 0:
                continue
            for other in range(edges[run, 0], edges[run, 1]):
                j = order[other]
                if rank[j] > rank[i] and _jaccard(grams, start[i], size[i], start[j], size[j]) >= threshold:
                    found[i] = j
                    break
