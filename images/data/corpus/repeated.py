"""Texts that say nothing twice: told from the hashes of their n-grams, many texts at once.

It is a sieve before `rules.repeats`, which reads words as Python's `re` does. Where all characters of a text are of the
scripts below, every word of that rule is one word of `shingles` or several; so what the rule finds twice is found twice
here. The other way round is no matter: case is passed over here, and there it is not.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from corpus.bits import load64
from corpus.jit import in_parts, kernel
from corpus.shingles import HIGH, Bytes, Hashes, Offsets, Texts, room, shingle

Flags = NDArray[np.bool_]

RANGES = (
    (0x00, 0x7F),
    (0x2000, 0x206F),  # general punctuation
    (0x3000, 0x3029), (0x3040, 0x30FF), (0x3400, 0x9FFF),  # punctuation, kana, Han
    (0xFF00, 0xFF65),  # full width
)  # fmt: skip
"""Code points that both sides part words by in the same way, or that are more words here than there."""


def _plain() -> Flags:
    found = np.zeros(1 << 16, np.bool_)
    for first, last in RANGES:
        found[first : last + 1] = True
    return found


PLAIN = _plain()


def none(texts: Texts, n: int) -> Flags:
    """Of each text, shape (texts,), whether surely no n-gram of its words occurs in it twice."""
    found = np.zeros(len(texts), np.bool_)
    in_parts(lambda first, last: _mark(texts.data, texts.offsets, first, last, n, PLAIN, found), len(texts))
    return found


@kernel
def _mark(data: Bytes, offsets: Offsets, first: int, last: int, n: int, plain: Flags, out: Flags) -> None:
    longest = 0
    for text in range(first, last):
        longest = max(longest, offsets[text + 1] - offsets[text])
    grams = np.empty(room(0, longest), np.uint64)
    size = 1
    while size < 2 * len(grams):
        size *= 2
    seen = np.empty(size, np.uint64)
    for text in range(first, last):
        start, stop = offsets[text], offsets[text + 1]
        if _is_plain(data, start, stop, plain):
            out[text] = _differ(grams, shingle(data, start, stop, n, grams), seen)


@kernel
def _is_plain(data: Bytes, start: int, stop: int, plain: Flags) -> bool:
    at = start
    while at < stop:
        if at + 8 <= stop and not load64(data, at) & HIGH:
            at += 8
            continue
        byte = data[at]
        width = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
        if width == 4 or at + width > stop:
            return False
        point = np.int64(byte) & (0x7F if width == 1 else 0x1F if width == 2 else 0x0F)
        for more in range(1, width):
            point = point << 6 | np.int64(data[at + more]) & 0x3F
        if not plain[point]:
            return False
        at += width
    return True


@kernel
def _differ(hashes: Hashes, count: int, seen: Hashes) -> bool:
    """Whether the first `count` hashes all differ; `seen` has room for twice as many."""
    size = 1
    while size < 2 * count:
        size *= 2
    seen[:size] = np.uint64(0)
    for at in range(count):
        value = max(hashes[at], np.uint64(1))
        slot = np.int64(value & np.uint64(size - 1))
        while seen[slot]:
            if seen[slot] == value:
                return False
            slot = (slot + 1) & (size - 1)
        seen[slot] = value
    return True
