"""MinHash signatures (Broder 1997), with datasketch's permutations and its `affine32` scheme, bit for bit.

A signature estimates the Jaccard similarity of two sets of n-grams: the share of equal values is its expectation.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from corpus.jit import in_parts, kernel
from corpus.shingles import Bytes, Hashes, Offsets, Texts, room, shingle

Signatures = NDArray[np.uint32]
Factors = NDArray[np.uint32]


def permutations(count: int, seed: int) -> tuple[Factors, Factors]:
    """Factors and summands of `count` permutations h → a h + b (mod 2^32): those of datasketch for this seed."""
    generator = np.random.RandomState(seed)
    a = generator.randint(0, 1 << 31, count, dtype=np.uint32) * np.uint32(2) + np.uint32(1)
    b = generator.randint(0, 1 << 32, count, dtype=np.uint32)
    return a, b


def signatures(texts: Texts, ngram: int, count: int, seed: int) -> tuple[Signatures, NDArray[np.int64]]:
    """Signatures of shape (texts, count), and how many n-grams each text has (repeated ones counted again)."""
    a, b = permutations(count, seed)
    signed = np.empty((len(texts), count), np.uint32)
    sizes = np.zeros(len(texts), np.int64)
    in_parts(lambda first, last: _sign(texts.data, texts.offsets, first, last, ngram, a, b, signed, sizes), len(texts))
    return signed, sizes


@kernel
def sign(hashes: NDArray[np.uint32], count: int, a: Factors, b: Factors, out: Factors) -> None:
    """The signature of a set of 32-bit hashes: for each permutation the smallest value."""
    out[:] = np.uint32(0xFFFFFFFF)
    for at in range(count):
        # Numba widens a product of 32-bit numbers to 64: every step is cut back, as it is in the original.
        value = np.uint32(hashes[at] ^ (hashes[at] >> np.uint32(16)))
        value = np.uint32(value * np.uint32(0x85EBCA6B))
        value = np.uint32(value ^ (value >> np.uint32(13)))
        value = np.uint32(value * np.uint32(0xC2B2AE35))
        value = np.uint32(value ^ (value >> np.uint32(16)))
        for k in range(len(a)):
            permuted = np.uint32(a[k] * value + b[k])
            if permuted < out[k]:
                out[k] = permuted


@kernel
def _sign(
    data: Bytes, offsets: Offsets, first: int, last: int, n: int, a: Factors, b: Factors, out: Signatures,
    sizes: NDArray[np.int64],
) -> None:  # fmt: skip
    longest = 0
    for text in range(first, last):
        longest = max(longest, room(offsets[text], offsets[text + 1]))
    grams: Hashes = np.empty(longest, np.uint64)
    halves = np.empty(longest, np.uint32)
    for text in range(first, last):
        count = shingle(data, offsets[text], offsets[text + 1], n, grams)
        for at in range(count):
            halves[at] = np.uint32(grams[at] >> np.uint64(32))
        sign(halves, count, a, b, out[text])
        sizes[text] = count
