"""Texts in canonical composition and lower case, where they are not so already: most are, in any script.

Both are Python's own, a text at a time: what calls itself NFC in Arrow leaves everything decomposed (apache/arrow
#51225). To see that neither would change a text takes a kernel next to nothing. ASCII capitals are left:
`shingles.words` takes them for lower case itself.

Source: Unicode Standard Annex 15, Normalization Forms, section 9, the quick check.
"""

from __future__ import annotations

import unicodedata

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from corpus.bits import load64
from corpus.jit import in_parts, kernel
from corpus.shingles import HIGH, Bytes, Offsets, Texts

Flags = NDArray[np.bool_]

RANGES = (
    (0x00, 0xBF), (0xDF, 0xFF),  # ASCII, signs, small letters of the west
    (0x430, 0x45F),  # small Cyrillic letters
    (0x2010, 0x2027), (0x2030, 0x205E), (0x20A0, 0x20BF),  # dashes, quotes, currencies
    (0x3000, 0x3029), (0x3030, 0x3098), (0x309B, 0x30FF),  # punctuation and kana, without the marks that compose
    (0x3400, 0x9FFF), (0xAC00, 0xD7A3),  # Han, Hangul syllables
    (0xFF00, 0xFF20), (0xFF3B, 0xFF9D),  # full width, without capitals
    (0x1F300, 0x1FAFF), (0x20000, 0x2F7FF),  # emoji, more Han
)  # fmt: skip
"""Code points that stay as they are, whatever stands before them. Others may: Python is asked."""


def _settled() -> Flags:
    found = np.zeros(RANGES[-1][1] + 1, np.bool_)
    for first, last in RANGES:
        found[first : last + 1] = True
    return found


SETTLED = _settled()


def lowered(array: pa.LargeStringArray) -> Texts:
    """The texts of an Arrow array without nulls as they are compared; those that stay as they are, where they are."""
    texts = Texts.of_array(array)
    changes = np.zeros(len(texts), np.bool_)
    in_parts(lambda first, last: _may_change(texts.data, texts.offsets, first, last, SETTLED, changes), len(texts))
    if not changes.any():
        return texts
    mask = pa.array(changes)
    others = [unicodedata.normalize("NFC", text).lower() for text in array.filter(mask).to_pylist()]
    return Texts.of_array(pc.replace_with_mask(array, mask, pa.array(others, array.type)))


@kernel
def _may_change(data: Bytes, offsets: Offsets, first: int, last: int, settled: Flags, out: Flags) -> None:
    for text in range(first, last):
        at, stop = offsets[text], offsets[text + 1]
        while at < stop:
            if at + 8 <= stop and not load64(data, at) & HIGH:
                at += 8
                continue
            byte = data[at]
            if np.uint8(0xE4) <= byte <= np.uint8(0xE9):
                at += 3  # U+4000 to U+9FFF, most of a Chinese text: all of it is settled
                continue
            width = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            point = np.int64(byte) & (0x7F if width == 1 else 0x1F if width == 2 else 0x0F if width == 3 else 0x07)
            for more in range(1, min(width, stop - at)):
                point = point << 6 | np.int64(data[at + more]) & 0x3F
            if point >= len(settled) or not settled[point]:
                out[text] = True
                break
            at += width
