"""Near duplicates: MinHash bands propose pairs, the exact Jaccard similarity of their n-gram sets decides.

Two texts are a candidate pair when one of `bands` bands of `rows` signature values is equal. Every candidate is
verified, so a set that is merely contained in a bigger one, or a template that differs in a number, is no duplicate
unless the similarity says so. The result depends on the texts, never on their order.

Source: Leskovec, Rajaraman, Ullman, Mining of Massive Datasets, chapter 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from corpus.jit import in_parts, kernel
from corpus.minhash import Signatures, signatures
from corpus.shingles import Bytes, Hashes, Offsets, Texts, mix64, room, shingle
from refit.spec import Dedup

Index = NDArray[np.int64]


@dataclass(frozen=True)
class Clusters:
    """`root[i]` is the lowest number of the texts that text i is connected with by verified pairs."""

    root: Index
    candidate_pairs: int
    verified_pairs: int


@dataclass(frozen=True)
class _Sets:
    """The n-gram sets of some texts, sorted, without repeats: of text i, grams[start[i]:start[i] + size[i]]."""

    grams: Hashes
    start: Index
    size: Index


def clusters(texts: Texts, settings: Dedup) -> Clusters:
    """Texts connected by pairs whose similarity is at least the threshold."""
    index = _Index(texts, settings)
    root = np.arange(len(texts), dtype=np.int64)
    tried = verified = 0
    for order, edges in index.buckets():
        more_tried, more_verified = _link(
            order, edges, index.sets.grams, index.sets.start, index.sets.size, settings.threshold, root
        )
        tried, verified = tried + more_tried, verified + more_verified
    for text in range(len(root)):
        root[text] = root[root[text]]  # links point downwards, so one pass from below finds every root
    return Clusters(root, tried, verified)


def matches(texts: Texts, rank: NDArray[np.int64], settings: Dedup) -> Index:
    """For each text a text of a higher rank that it is near to; -1 where there is none."""
    index = _Index(texts, settings)
    found = np.full(len(texts), -1, np.int64)
    for order, edges in index.buckets():
        _match(
            order, edges, index.sets.grams, index.sets.start, index.sets.size, settings.threshold, rank, found
        )  # fmt: skip
    return found


def similarity(texts: Texts, left: Index, right: Index, ngram: int) -> NDArray[np.float64]:
    """The exact similarity of pairs of texts."""
    sets = _sets(texts, np.union1d(left, right), ngram)
    out = np.zeros(len(left), np.float64)
    for at, (i, j) in enumerate(zip(left, right, strict=True)):
        out[at] = _jaccard(sets.grams, sets.start[i], sets.size[i], sets.start[j], sets.size[j])
    return out


class _Index:
    """Texts in buckets by band, and the sets of all that share a bucket with another."""

    def __init__(self, texts: Texts, settings: Dedup) -> None:
        signed, sizes = signatures(texts, settings.ngram, settings.bands * settings.rows, settings.seed)
        self._some = np.flatnonzero(sizes)
        self._keys = np.empty((settings.bands, len(self._some)), np.uint64)
        _bands(signed, self._some, settings.rows, self._keys)
        shared = np.zeros(len(texts), bool)
        for order, edges in self.buckets():
            for first, last in edges:
                shared[order[first:last]] = True
        self.sets = _sets(texts, np.flatnonzero(shared), settings.ngram)

    def buckets(self) -> Iterator[tuple[Index, Index]]:
        """For each band: text numbers in the order of their key, and (first, last) of each run of equal keys."""
        for keys in self._keys:
            order = np.argsort(keys, kind="stable")
            new = np.flatnonzero(np.diff(keys[order]) != 0) + 1
            edges = np.stack([np.concatenate([[0], new]), np.concatenate([new, [len(keys)]])], axis=1)
            yield self._some[order], edges[edges[:, 1] - edges[:, 0] > 1].astype(np.int64)


def _sets(texts: Texts, wanted: Index, ngram: int) -> _Sets:
    start = np.zeros(len(texts), np.int64)
    size = np.zeros(len(texts), np.int64)
    rooms = (texts.offsets[wanted + 1] - texts.offsets[wanted]) // 2 + 2
    start[wanted] = np.concatenate([[0], np.cumsum(rooms)[:-1]]) if len(wanted) else 0
    grams = np.empty(int(rooms.sum()), np.uint64)
    in_parts(
        lambda first, last: _fill(texts.data, texts.offsets, wanted[first:last], ngram, grams, start, size),
        len(wanted),
    )
    return _Sets(grams, start, size)


@kernel
def _fill(data: Bytes, offsets: Offsets, wanted: Index, n: int, grams: Hashes, start: Index, size: Index) -> None:
    for text in wanted:
        place = grams[start[text] : start[text] + room(offsets[text], offsets[text + 1])]
        count = shingle(data, offsets[text], offsets[text + 1], n, place)
        place[:count] = np.sort(place[:count])
        unique = 0
        for at in range(count):
            if at == 0 or place[at] != place[at - 1]:
                place[unique] = place[at]
                unique += 1
        size[text] = unique


@kernel
def _bands(signed: Signatures, some: Index, rows: int, keys: NDArray[np.uint64]) -> None:
    for band in range(keys.shape[0]):
        for at in range(len(some)):
            key = np.uint64(band)
            for row in range(band * rows, (band + 1) * rows):
                key = mix64(key ^ np.uint64(signed[some[at], row]))
            keys[band, at] = key


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
