"""JSON's strings, numbers and words in UTF-8 bytes: where one ends, and what a string's escapes mean.

Strict: what is not sound (RFC 8259, and RFC 3629 for UTF-8), or half a surrogate pair, is `ODD`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from corpus.bits import load64, lowest_bit
from corpus.jit import kernel
from corpus.shingles import HIGH, ONES, Bytes

ODD = -1
DIGITS = 64
"""A longer number is odd too; Python's own limit lies beyond."""
QUOTE, BACKSLASH, MINUS, POINT = b'"\\-.'
QUOTES, BACKSLASHES, BLANKS = (np.uint64(byte * 0x0101010101010101) for byte in (QUOTE, BACKSLASH, 0x20))
HAN, HAN_LEADS = np.uint64(0xC0C0F0C0C0F0), np.uint64(0x8080E08080E0)
"""Two characters of three bytes each, the commonest beyond ASCII."""


def _escapes() -> NDArray[np.uint8]:
    meant = np.zeros(256, np.uint8)
    for sign, byte in zip(b'"\\/bfnrt', b'"\\/\b\f\n\r\t', strict=True):
        meant[sign] = byte
    return meant


def _hex() -> NDArray[np.int64]:
    value = np.full(256, -1, np.int64)
    for digit in b"0123456789abcdefABCDEF":
        value[digit] = int(chr(digit), 16)
    return value


ESCAPES, HEX = _escapes(), _hex()


@kernel
def string_end(data: Bytes, at: int, stop: int) -> tuple[int, int]:
    """Where a string's closing quote is, and how many bytes its escapes are more than what they mean; else `ODD`."""
    more = 0
    while True:
        while at + 8 <= stop:
            eight = load64(data, at)
            quote, backslash = eight ^ QUOTES, eight ^ BACKSLASHES
            # The lowest bit is right: what a byte borrows falsifies only those above it.
            stops = (((quote - ONES) & ~quote) | ((backslash - ONES) & ~backslash) | (eight - BLANKS) | eight) & HIGH
            if stops:
                at += int(lowest_bit(stops) >> np.uint64(3))
                break
            at += 8
        if at >= stop:
            return ODD, 0
        byte = data[at]
        if byte == QUOTE:
            return at, more
        if byte == BACKSLASH:
            width, size, _ = _escape(data, at, stop)
            if width == 0:
                return ODD, 0
            at += width
            more += width - size
        elif byte < 0x20:
            return ODD, 0
        elif byte < 0x80:
            at += 1
        else:
            end = _beyond_ascii(data, at, stop)
            if end < 0:
                return ODD, 0
            at = end


@kernel
def _beyond_ascii(data: Bytes, at: int, stop: int) -> int:
    """The end of a run of characters beyond ASCII; `ODD` where it is not UTF-8 (RFC 3629, section 4)."""
    while at < stop and data[at] >= 0x80:
        byte = data[at]
        if at + 8 <= stop and load64(data, at) & HAN == HAN_LEADS and _is_plain(byte) and _is_plain(data[at + 3]):
            at += 6
            continue
        width = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
        if byte < 0xC2 or byte > 0xF4 or at + width > stop:
            return ODD
        second = data[at + 1]
        lowest = 0xA0 if byte == 0xE0 else 0x90 if byte == 0xF0 else 0x80
        highest = 0x9F if byte == 0xED else 0x8F if byte == 0xF4 else 0xBF
        if second < lowest or second > highest:
            return ODD
        for place in range(at + 2, at + width):
            if data[place] & 0xC0 != 0x80:
                return ODD
        at += width
    return at


@kernel
def _is_plain(lead: np.uint8) -> bool:
    """Whether any two continuations may follow a lead of three bytes."""
    return int(lead) not in (0xE0, 0xED)


@kernel
def _escape(data: Bytes, at: int, stop: int) -> tuple[int, int, int]:
    """An escape's width, its character's in UTF-8, and its code point; width 0 where it is none, or half a pair."""
    if at + 1 >= stop:
        return 0, 0, 0
    meant = ESCAPES[data[at + 1]]
    if meant:
        return 2, 1, int(meant)
    point = _four_digits(data, at, stop)
    if point < 0 or 0xDC00 <= point <= 0xDFFF:
        return 0, 0, 0
    if point >= 0xD800:
        if point <= 0xDBFF:
            low = _four_digits(data, at + 6, stop)
            if low < 0xDC00 or low > 0xDFFF:
                return 0, 0, 0
            return 12, 4, 0x10000 + ((point - 0xD800) << 10) + (low - 0xDC00)
        return 6, 3, point
    return 6, 1 if point < 0x80 else 2 if point < 0x800 else 3, point


@kernel
def _four_digits(data: Bytes, at: int, stop: int) -> int:
    """The code unit of \\uXXXX; -1 where that is not what stands there."""
    if at + 6 > stop or data[at] != BACKSLASH or data[at + 1] != 0x75:
        return -1
    unit = 0
    for place in range(at + 2, at + 6):
        digit = HEX[data[place]]
        if digit < 0:
            return -1
        unit = unit << 4 | digit
    return unit


@kernel
def scalar_end(data: Bytes, at: int, stop: int) -> tuple[int, bool]:
    """The end of a number, true, false or null, and whether it is a whole number as Python writes it; else `ODD`."""
    byte = data[at]
    if byte == 0x74:
        return _word(data, at, stop, 0x65757274, 4), False
    if byte == 0x6E:
        return _word(data, at, stop, 0x6C6C756E, 4), False
    if byte == 0x66:
        return _word(data, at + 1, stop, 0x65736C61, 4), False
    end = at + 1 if byte == MINUS else at
    first = end
    end = _digits(data, end, stop)
    if end == first or (data[first] == 0x30 and end > first + 1):
        return ODD, False
    whole = not (byte == MINUS and data[first] == 0x30)
    if end < stop and data[end] == POINT:
        whole = False
        begin = end + 1
        end = _digits(data, begin, stop)
        if end == begin:
            return ODD, False
    if end < stop and data[end] | 0x20 == 0x65:
        whole = False
        begin = end + 1
        if begin < stop and (data[begin] == MINUS or data[begin] == 0x2B):
            begin += 1
        end = _digits(data, begin, stop)
        if end == begin:
            return ODD, False
    return (end, whole) if end - at <= DIGITS else (ODD, False)


@kernel
def _digits(data: Bytes, at: int, stop: int) -> int:
    while at < stop and 0x30 <= data[at] <= 0x39:
        at += 1
    return at


@kernel
def _word(data: Bytes, at: int, stop: int, letters: int, width: int) -> int:
    if at + width > stop:
        return ODD
    for place in range(width):
        if np.int64(data[at + place]) != letters >> (8 * place) & 0xFF:
            return ODD
    return at + width


@kernel
def unescape(data: Bytes, at: int, stop: int, out: Bytes, to: int) -> None:
    """Write what a string between its quotes means; its escapes are sound, `string_end` has seen to that."""
    while at < stop:
        byte = data[at]
        if byte != BACKSLASH:
            out[to] = byte
            at += 1
            to += 1
            continue
        width, size, point = _escape(data, at, stop)
        at += width
        if size == 1:
            out[to] = point
        else:
            for place in range(size - 1, 0, -1):
                out[to + place] = 0x80 | (point & 0x3F)
                point >>= 6
            out[to] = (0xC0 if size == 2 else 0xE0 if size == 3 else 0xF0) | point
        to += size
