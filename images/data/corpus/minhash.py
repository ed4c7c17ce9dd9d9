"""MinHash signatures (Broder 1997), with datasketch's permutations and its `affine32` scheme, bit for bit.

A signature estimates the Jaccard similarity of two sets of n-grams: the share of equal values is its expectation.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from corpus.jit import in_parts, kernel
from corpus.shingles import FACTOR, Bytes, Hashes, Offsets, Texts, mix64, shingle

Factors = NDArray[np.uint32]


@dataclass(frozen=True)
class Signed:
    """What candidates among some texts are found by: how many n-grams each has, and their keys, a band at a time."""

    bands: int
    sizes: NDArray[np.int64]
    band: Callable[[int], Hashes]


def signed(parts: Iterable[Texts], *, ngram: int, bands: int, rows: int, seed: int) -> Signed:
    """The signatures of texts, numbered on through all parts; all keys are held. Arguments as of `band_keys`."""
    keys: list[Hashes] = []
    sizes = [np.zeros(0, np.int64)]
    for texts in parts:
        keys.append(_pages(bands, len(texts)))
        sizes.append(np.zeros(len(texts), np.int64))
        band_keys(texts, ngram, rows, seed, keys[-1], sizes[-1])

    def band(number: int) -> Hashes:
        return np.concatenate([np.zeros(0, np.uint64), *(part[number] for part in keys)])

    return Signed(bands, np.concatenate(sizes), band)


def _pages(*shape: int) -> Hashes:
    """Zeros in pages of their own, which go back to the machine with them: what is so big must not stay as waste."""
    size = 8 * math.prod(shape)
    pages = mmap.mmap(-1, max(1, size), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, np.uint64, size // 8).reshape(shape)


def permutations(count: int, seed: int) -> tuple[Factors, Factors]:
    """Factors and summands of `count` permutations h → a h + b (mod 2^32): those of datasketch for this seed."""
    generator = np.random.RandomState(seed)
    a = generator.randint(0, 1 << 31, count, dtype=np.uint32) * np.uint32(2) + np.uint32(1)
    b = generator.randint(0, 1 << 32, count, dtype=np.uint32)
    return a, b


def _halves(texts: Texts, first: int, last: int, ngram: int) -> tuple[Factors, NDArray[np.int64]]:
    """The upper halves of the n-grams of some texts, one text after the other, and where each begins."""
    rooms = np.diff(texts.offsets[first : last + 1]) // 2 + 2
    grams: Hashes = np.empty(int(rooms.max(initial=0)), np.uint64)
    halves: Factors = np.empty(int(rooms.sum()), np.uint32)
    starts = np.zeros(last - first + 1, np.int64)
    _halve(texts.data, texts.offsets, first, ngram, grams, halves, starts)
    return halves, starts


def band_keys(texts: Texts, ngram: int, rows: int, seed: int, keys: Hashes, sizes: NDArray[np.int64]) -> None:
    """Write a key of every band of every text, and how many n-grams each text has.

    Two texts have one key where all `rows` values of the band are equal. The signatures themselves are never kept:
    four times the memory, for nothing that is looked at again.

    Args:
        texts: some texts.
        ngram: words in an n-gram.
        rows: values of a signature in a band.
        seed: of the permutations.
        keys: where the keys go, of shape (bands, texts).
        sizes: where the numbers of n-grams go, of shape (texts,).
    """
    a, b = permutations(len(keys) * rows, seed)

    def work(first: int, last: int) -> None:
        halves, starts = _halves(texts, first, last, ngram)
        sizes[first:last] = np.diff(starts)
        _key(halves, starts, rows, a, b, keys[:, first:last])

    in_parts(work, len(texts))


@kernel
def sign(hashes: NDArray[np.uint32], count: int, a: Factors, b: Factors, out: Factors) -> None:
    """The signature of a set of 32-bit hashes: for each permutation the smallest value.

    Four hashes a pass: most of a pass is reading and writing `out`.
    """
    out[:] = np.uint32(0xFFFFFFFF)
    for at in range(0, count - 3, 4):
        v, w, x, y = fmix32(hashes[at]), fmix32(hashes[at + 1]), fmix32(hashes[at + 2]), fmix32(hashes[at + 3])
        for k in range(len(a)):
            # Numba widens a product of 32-bit numbers to 64: every step is cut back, as it is in the original.
            left = min(np.uint32(a[k] * v + b[k]), np.uint32(a[k] * w + b[k]))
            right = min(np.uint32(a[k] * x + b[k]), np.uint32(a[k] * y + b[k]))
            out[k] = min(out[k], min(left, right))
    for at in range(count - count % 4, count):
        v = fmix32(hashes[at])
        for k in range(len(a)):
            out[k] = min(out[k], np.uint32(a[k] * v + b[k]))


@kernel
def fmix32(value: np.uint32) -> np.uint32:
    """MurmurHash3's 32-bit finalizer."""
    value = np.uint32(value ^ (value >> np.uint32(16)))
    value = np.uint32(value * np.uint32(0x85EBCA6B))
    value = np.uint32(value ^ (value >> np.uint32(13)))
    value = np.uint32(value * np.uint32(0xC2B2AE35))
    return np.uint32(value ^ (value >> np.uint32(16)))


# Two kernels, not one: together they are too much for the compiler, and what `sign` is made of is left unvectorised.


@kernel
def _halve(
    data: Bytes, offsets: Offsets, first: int, n: int, grams: Hashes, halves: Factors, starts: NDArray[np.int64]
) -> None:
    at = 0
    for text in range(len(starts) - 1):
        count = shingle(data, offsets[first + text], offsets[first + text + 1], n, grams)
        for gram in range(count):
            halves[at + gram] = np.uint32(grams[gram] >> np.uint64(32))
        at += count
        starts[text + 1] = at


@kernel
def _key(halves: Factors, starts: NDArray[np.int64], rows: int, a: Factors, b: Factors, keys: Hashes) -> None:
    signed = np.empty(len(a), np.uint32)
    for text in range(len(starts) - 1):
        sign(halves[starts[text] :], starts[text + 1] - starts[text], a, b, signed)
        for band in range(len(keys)):
            key = np.uint64(band)
            for row in range(band * rows, (band + 1) * rows):
                key = (key ^ np.uint64(signed[row])) * FACTOR
            keys[band, text] = mix64(key)
