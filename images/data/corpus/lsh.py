"""Near duplicates: MinHash bands propose pairs, the exact Jaccard similarity of their n-gram sets decides.

Two texts are a candidate pair when one of `bands` bands of `rows` signature values is equal. Every candidate is
verified, so a set that is merely contained in a bigger one, or a template that differs in a number, is no duplicate
unless the similarity says so. The result depends on the texts, never on their order.

Source: Leskovec, Rajaraman, Ullman, Mining of Massive Datasets, chapter 3.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from corpus.grams import Sets, jaccard, sets_of
from corpus.jit import kernel
from corpus.minhash import Signed, signed
from corpus.shingles import Hashes, Texts
from refit.spec import Dedup

Index = NDArray[np.int64]
Shares = NDArray[np.float64]
Pick = Callable[[Index], Iterable[Texts]]
"""Gives the texts of these numbers, which rise, in parts."""

BANDS_AT_ONCE = 4
"""A band at work takes some fifty bytes a text: not one a core, where there are many."""


@dataclass(frozen=True)
class Pairs:
    """Near pairs: text `left[i]` and text `right[i]`, and how similar they are.

    As many as it takes to connect what is near: of texts that are connected already no more pairs are looked for.
    `candidates` is how many were looked at.
    """

    left: Index
    right: Index
    similarity: Shares
    candidates: int

    @classmethod
    def none(cls) -> Self:
        """No pairs."""
        return cls(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float64), 0)


@dataclass(frozen=True)
class Clusters:
    """`root[i]` is the lowest number of the texts that text i is connected with by verified pairs."""

    root: Index
    candidate_pairs: int
    verified_pairs: int


@dataclass(frozen=True)
class Matches:
    """`found[i]` is a text of a higher rank that text i is near to, and how near; -1 where there is none."""

    found: Index
    similarity: Shares


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
    shared = _share(signed(parts, **settings.model_dump(exclude={"threshold"})))  # the keys are let go here
    picked = whole(pick(shared.texts)) if pick else _those(parts, shared.texts)
    root, pairs = _linked(shared, sets_of(picked, shared.texts, shared.sizes, settings.ngram), settings.threshold)
    return Clusters(root, pairs.candidates, len(pairs.left))


def near_pairs(given: Signed, pick: Pick, settings: Dedup) -> Pairs:
    """Pairs that connect whatever shares a key of the given bands and is near; the candidates' texts are picked, once.

    Of several groups of bands each may be asked for itself: what all their pairs connect is what `clusters` finds.
    """
    shared = _share(given)
    return _linked(shared, _picked(shared, pick, settings), settings.threshold)[1]


def connected(count: int, left: Index, right: Index) -> Index:
    """Of each of `count` texts the lowest number of those that it is connected with by pairs."""
    root = np.arange(count, dtype=np.int64)
    _connect(left, right, root)
    _settle(root)
    return root


def matches(given: Signed, pick: Pick, rank: Index, settings: Dedup) -> Matches:
    """For each text a text of a higher rank that it is near to; the candidates' texts are picked, once.

    `similarity` says something only where one is found.
    """
    shared = _share(given)
    sets = _picked(shared, pick, settings)
    found, similarity = np.full(len(rank), -1, np.int64), np.zeros(len(rank), np.float64)
    for order, edges in shared.buckets:
        _match(order, edges, sets.grams, sets.start, sets.size, settings.threshold, rank, found, similarity)
    return Matches(found, similarity)


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


def _picked(shared: _Shared, pick: Pick, settings: Dedup) -> Sets:
    return sets_of(whole(pick(shared.texts)), shared.texts, shared.sizes, settings.ngram)


def _linked(shared: _Shared, sets: Sets, threshold: float) -> tuple[Index, Pairs]:
    """Verify the candidates, and connect them."""
    root = np.arange(len(shared.sizes), dtype=np.int64)
    # A pair connects what was not: there is one fewer than texts at most.
    left, right = (np.empty(len(shared.texts), np.int64) for _ in range(2))
    similarity = np.empty(len(shared.texts), np.float64)
    tried = count = 0
    for order, edges in shared.buckets:
        more, count = _link(
            order, edges, sets.grams, sets.start, sets.size, threshold, root, left, right, similarity, count
        )
        tried += more
    _settle(root)
    return root, Pairs(left[:count], right[:count], similarity[:count], tried)


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


def whole(parts: Iterable[Texts]) -> Iterator[tuple[Texts, Index]]:
    """Each part with the numbers of all its texts."""
    return ((texts, np.arange(len(texts))) for texts in parts)


def _those(parts: Iterable[Texts], wanted: Index) -> Iterator[tuple[Texts, Index]]:
    """Each part, with the numbers that those of the wanted texts have in it which it holds; `wanted` rises."""
    first = 0
    for texts in parts if len(wanted) else ():
        last = first + len(texts)
        yield texts, wanted[slice(*np.searchsorted(wanted, (first, last)))] - first
        first = last


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
def _connect(left: Index, right: Index, root: Index) -> None:
    for pair in range(len(left)):
        one, other = _root(root, left[pair]), _root(root, right[pair])
        root[max(one, other)] = min(one, other)


@kernel
def _link(
    order: Index, edges: Index, grams: Hashes, start: Index, size: Index, threshold: float, root: Index,
    left: Index, right: Index, similarity: Shares, count: int,
) -> tuple[int, int]:  # fmt: skip
    tried = 0
    for run in range(len(edges)):
        for at in range(edges[run, 0], edges[run, 1]):
            i = order[at]
            for other in range(at + 1, edges[run, 1]):
                j = order[other]
                one, two = _root(root, i), _root(root, j)
                if one == two:
                    continue  # connected already: another pair cannot change the outcome
                tried += 1
                found = jaccard(grams, start[i], size[i], start[j], size[j])
                if found >= threshold:
                    left[count], right[count], similarity[count] = min(i, j), max(i, j), found
                    count += 1
                    root[max(one, two)] = min(one, two)
    return tried, count


@kernel
def _match(
    order: Index, edges: Index, grams: Hashes, start: Index, size: Index, threshold: float, rank: Index, found: Index,
    similarity: Shares,
) -> None:  # fmt: skip
    for run in range(len(edges)):
        for at in range(edges[run, 0], edges[run, 1]):
            i = order[at]
            if found[i] >= 0:
                continue
            for other in range(edges[run, 0], edges[run, 1]):
                j = order[other]
                if rank[j] <= rank[i]:
                    continue
                similarity[i] = jaccard(grams, start[i], size[i], start[j], size[j])
                if similarity[i] >= threshold:
                    found[i] = j
                    break
