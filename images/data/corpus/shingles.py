"""Texts as sets of hashed word n-grams, straight from Arrow's UTF-8 buffers.

A word is a run of letters and digits; Han, kana and the like are a word each, since those scripts have no blanks.
Whatever separates words is passed over, so re-wrapped and re-punctuated text has the same n-grams. A text of fewer
than n words is one n-gram of all of them; a text without words has none, and is near to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from corpus.bits import load64, lowest_bit
from corpus.jit import kernel

FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""2^64 over the golden ratio: odd, and without a pattern in its bits."""
HIGH, LOWER, ONES = (np.uint64(byte * 0x0101010101010101) for byte in (0x80, 0x20, 0x01))
GATHER = np.uint64(0x0102040810204080)
"""Brings the lowest bits of eight bytes together in the highest one."""
SEPARATES = np.array([not chr(byte).isalnum() for byte in range(128)])
"""Which ASCII bytes stand between words."""

Bytes = NDArray[np.uint8]
Offsets = NDArray[np.int64]
Hashes = NDArray[np.uint64]


@dataclass(frozen=True)
class Texts:
    """UTF-8 bytes of many texts; text i is data[offsets[i]:offsets[i + 1]]."""

    data: Bytes
    offsets: Offsets

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @classmethod
    def of(cls, texts: Sequence[str]) -> Texts:
        """Texts in one buffer."""
        return cls.of_array(pa.array(texts, pa.large_string()))

    @classmethod
    def of_array(cls, array: pa.LargeStringArray) -> Texts:
        """The texts of an Arrow array without nulls, where they are."""
        _, offsets, data = array.buffers()
        return cls(
            np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8),
            np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1]
            if len(array)
            else np.zeros(1, np.int64),
        )


@kernel
def mix64(value: np.uint64) -> np.uint64:
    """MurmurHash3's 64-bit finalizer."""
    value ^= value >> np.uint64(33)
    value *= np.uint64(0xFF51AFD7ED558CCD)
    value ^= value >> np.uint64(33)
    value *= np.uint64(0xC4CEB9FE1A85EC53)
    return value ^ (value >> np.uint64(33))


@kernel
def is_separator(point: int) -> bool:
    """Whether a code point above ASCII stands between words: blanks and punctuation."""
    return (
        point < 0xAA
        or point in (0xAB, 0xAC, 0xAD, 0xAE, 0xAF, 0xB1, 0xB4, 0xB6, 0xB7, 0xB8, 0xBB, 0xBF, 0xD7, 0xF7)
        or 0x2000 <= point <= 0x206F
        or 0x3000 <= point <= 0x3004
        or 0x3008 <= point <= 0x3020
        or 0xFF00 <= point <= 0xFF0F
        or 0xFF1A <= point <= 0xFF20
        or 0xFF3B <= point <= 0xFF40
        or 0xFF5B <= point <= 0xFF65
        or point == 0xFEFF
    )


@kernel
def is_word_alone(point: int) -> bool:
    """Whether a code point is a word of its own: Han, kana, bopomofo."""
    return 0x3040 <= point <= 0x312F or 0x3400 <= point <= 0x9FFF or 0xF900 <= point <= 0xFAFF or point >= 0x20000


@kernel
def words(data: Bytes, start: int, stop: int, out: Hashes) -> int:
    """Hash the words of data[start:stop] into `out`; returns how many. ASCII letters count as lower case."""
    if stop + 8 <= len(data):
        count = ascii_words(data, start, stop, out)
        if count >= 0:
            return count
    return any_words(data, start, stop, out)


@kernel
def ascii_words(data: Bytes, start: int, stop: int, out: Hashes) -> int:
    """As `words`, 64 bytes at a time; -1 where a byte is not ASCII. Reads up to eight bytes beyond `stop`."""
    count, begin, inside = 0, start, False
    before = np.uint64(0)
    for block in range(start, stop, 64):
        mask = np.uint64(0)
        for at in range(block, min(block + 64, stop), 8):
            eight = load64(data, at)
            if stop - at < 8:
                eight &= (np.uint64(1) << np.uint64(8 * (stop - at))) - np.uint64(1)
            if eight & HIGH:
                return -1
            mask |= in_words(eight) << np.uint64(at - block)
        turns = mask ^ (mask << np.uint64(1) | before)
        before = mask >> np.uint64(63)
        while turns:
            at = block + int(lowest_bit(turns))
            turns &= turns - np.uint64(1)
            if inside:
                out[count] = hash_ascii(data, begin, at)
                count += 1
            else:
                begin = at
            inside = not inside
    if inside:
        out[count] = hash_ascii(data, begin, stop)
        count += 1
    return count


@kernel
def in_words(eight: np.uint64) -> np.uint64:
    """Which of eight ASCII bytes are letters or digits, as eight bits."""
    lower = eight | LOWER
    # A byte's high bit tells whether it is at least so much; no sum runs over into the next byte.
    letter = (lower + ONES * np.uint64(0x80 - 97)) & ~(lower + ONES * np.uint64(0x80 - 123))
    digit = (eight + ONES * np.uint64(0x80 - 48)) & ~(eight + ONES * np.uint64(0x80 - 58))
    return ((((letter | digit) & HIGH) >> np.uint64(7)) * GATHER) >> np.uint64(56)


@kernel
def hash_ascii(data: Bytes, begin: int, end: int) -> np.uint64:
    """The hash of an ASCII word: eight bytes a round, in lower case (a digit has that bit already)."""
    word = FACTOR
    while end - begin >= 8:
        word = mix64(word ^ (load64(data, begin) | LOWER))
        begin += 8
    rest = (np.uint64(1) << np.uint64(8 * (end - begin))) - np.uint64(1)
    return mix64(word ^ ((load64(data, begin) | LOWER) & rest))


@kernel
def any_words(data: Bytes, start: int, stop: int, out: Hashes) -> int:
    """As `words`, a character at a time."""
    count = 0
    word, chunk, shift = FACTOR, np.uint64(0), np.uint64(0)
    inside = False
    at = start
    while at < stop:
        byte = data[at]
        if np.uint8(0xE4) <= byte <= np.uint8(0xE9) and at + 3 <= stop:
            # Most of a Chinese text: U+4000 to U+9FFF, three bytes each and a word each.
            if inside:
                out[count] = mix64(word ^ chunk)
                count += 1
                inside = False
            three = np.uint64(byte) | np.uint64(data[at + 1]) << np.uint64(8) | np.uint64(data[at + 2]) << np.uint64(16)
            out[count] = mix64(FACTOR ^ three)
            count += 1
            at += 3
            continue
        width = 1
        alone = False
        separates = True
        if byte < 0x80:
            separates = SEPARATES[byte]
            byte |= np.uint8(0x20)  # lower case; a digit has the bit already
        else:
            width = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            point = np.int64(byte) & (0x1F if width == 2 else 0x0F if width == 3 else 0x07)
            for more in range(1, min(width, stop - at)):
                point = point << 6 | np.int64(data[at + more]) & 0x3F
            alone = is_word_alone(int(point))
            separates = is_separator(int(point))
        if inside and (separates or alone):
            out[count] = mix64(word ^ chunk)
            count += 1
            inside = False
        if not separates:
            if not inside:
                word, chunk, shift = FACTOR, np.uint64(0), np.uint64(0)
                inside = True
            chunk |= np.uint64(byte) << shift
            shift += np.uint64(8)
            for more in range(1, min(width, stop - at)):
                if shift == np.uint64(64):
                    word, chunk, shift = mix64(word ^ chunk), np.uint64(0), np.uint64(0)
                chunk |= np.uint64(data[at + more]) << shift
                shift += np.uint64(8)
            if shift == np.uint64(64):
                word, chunk, shift = mix64(word ^ chunk), np.uint64(0), np.uint64(0)
        if alone:
            out[count] = mix64(word ^ chunk)
            count += 1
            inside = False
        at += width
    if inside:
        out[count] = mix64(word ^ chunk)
        count += 1
    return count


@kernel
def shingle(data: Bytes, start: int, stop: int, n: int, out: Hashes) -> int:
    """Hash the word n-grams of data[start:stop] into `out` (in place of its words); returns how many.

    A gram is a polynomial of its words, which rolls on: the word that leaves is taken out, the one that comes added.
    """
    count = words(data, start, stop, out)
    if count == 0:
        return 0
    span = min(n, count)
    top = np.uint64(1)
    for _ in range(span - 1):
        top *= FACTOR
    salt = np.uint64(span) * top * FACTOR
    rolled = np.uint64(0)
    for word in range(span):
        rolled = rolled * FACTOR + out[word]
    for first in range(count - span + 1):
        leaves = out[first]
        out[first] = mix64(rolled + salt)
        if first + span < count:
            rolled = (rolled - leaves * top) * FACTOR + out[first + span]
    return count - span + 1


@kernel
def room(start: int, stop: int) -> int:
    """How many words a text of so many bytes can have at most."""
    return (stop - start) // 2 + 2
