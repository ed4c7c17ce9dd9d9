"""Where the rows of a jsonl file lie in its bytes, and their texts taken from there: a scanner that makes no objects.

A line is taken only where nothing about it is in doubt: an object of strict JSON in valid UTF-8, no key twice, the
`id` a string without escapes or a whole number, the `text` a string. Whatever else a line is, good or bad, is left to
a reader that can say what is wrong with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from corpus.jit import kernel
from corpus.literals import ODD, QUOTE, scalar_end, string_end, unescape
from corpus.readers import MAX_LINE
from corpus.shingles import FACTOR, Bytes, Hashes, Offsets, mix64

Index = NDArray[np.int64]

SHORTEST = len(b'{"id":1,"text":""}')
KEYS, DEPTH = 64, 16
"""More keys of open objects, or a deeper nest, is for the reader; Python's own limits lie beyond."""
OPENS, CLOSES, OPENS_LIST, CLOSES_LIST, COMMA, COLON, FEED = b"{}[],:\n"
VALUE, FIRST_VALUE, KEY, FIRST_KEY, AFTER = range(5)
ID, TEXT = 1, 2


@dataclass(frozen=True)
class Odd:
    """Lines that follow each other and are not for the scanner: their bytes, the first one's number (from 0) among the
    lines of the stretch, and how many of the stretch's rows stand before them.
    """

    start: int
    stop: int
    line: int
    row: int


@dataclass(frozen=True)
class Stretch:
    """The rows of a stretch of lines.

    The text of a row lies at data[start:start + width] and has `size` bytes: fewer where there are escapes.
    """

    ids: pa.StringArray
    start: Index
    width: Index
    size: Index
    odd: list[Odd]
    lines: int


def scan(data: Bytes, start: int, stop: int) -> Stretch:
    """The rows of data[start:stop]: whole lines, the last one perhaps without a line feed."""
    # The last line may be longer than all that memory can hold rows for; at most one of them is in it.
    most = (_last_line(data, start, stop) - start) // SHORTEST + 1
    rows, odd = np.empty((5, most), np.int64), np.empty((4, most + 1), np.int64)
    count, others, lines = _scan(data, start, stop, rows, odd)
    text, width, size, name, length = rows[:, :count]
    offsets = np.zeros(count + 1, np.int32)
    np.cumsum(length, out=offsets[1:])
    names = np.empty(offsets[-1], np.uint8)
    _copy(data, name, length, offsets, names)
    ids = pa.StringArray.from_buffers(count, pa.py_buffer(offsets), pa.py_buffer(names))
    found = [Odd(*place) for place in odd[:, :others].T.tolist()]
    return Stretch(ids, text.copy(), width.copy(), size.copy(), found, lines)


def next_line(data: Bytes, at: int) -> int:
    """Where the line after the one of data[at] begins."""
    return int(_line_end(data, at, len(data)))


@kernel
def take(
    data: Bytes, aside: Bytes, start: Index, width: Index, size: Index, rows: Index, offsets: Offsets, out: Bytes
) -> None:
    """Put the texts of rows[i] to out[offsets[i]:]. A start of -1 - n is n in `aside`."""
    for at in range(len(rows)):
        row = rows[at]
        if start[row] < 0:
            first, to = -1 - start[row], offsets[at]
            out[to : to + size[row]] = aside[first : first + size[row]]
        elif width[row] == size[row]:
            first, to = start[row], offsets[at]
            out[to : to + size[row]] = data[first : first + size[row]]
        else:
            unescape(data, start[row], start[row] + width[row], out, offsets[at])


@kernel
def _copy(data: Bytes, start: Index, size: Index, offsets: NDArray[np.int32], out: Bytes) -> None:
    for row in range(len(start)):
        for at in range(size[row]):
            out[offsets[row] + at] = data[start[row] + at]


@kernel
def _scan(data: Bytes, start: int, stop: int, rows: Index, odd: Index) -> tuple[int, int, int]:
    """Fill in `rows` and `odd`; how many there are of each, and of lines."""
    keys, opened = np.empty(KEYS, np.uint64), np.empty(DEPTH + 1, np.int64)
    found = np.empty(5, np.int64)
    count = others = lines = 0
    in_odd = False
    at = start
    while at < stop:
        first = _skip_blanks(data, at, stop)
        if first < stop and data[first] != FEED:
            end = _row(data, first, stop, keys, opened, found)
            if end == ODD or end - at >= MAX_LINE:
                end = _line_end(data, first, stop)
                if not in_odd:
                    odd[0, others], odd[2, others], odd[3, others] = at, lines, count
                    others += 1
                odd[1, others - 1] = end
                in_odd = True
            else:
                rows[:, count] = found
                count += 1
                in_odd = False
            at = end
        else:
            at = first + 1
        lines += 1
    return count, others, lines


@kernel
def _row(data: Bytes, at: int, stop: int, keys: Hashes, opened: Index, found: Index) -> int:
    """Read a line's object: where the next line begins, or `ODD`. `found`: text's start, width, size; id's start, size.

    `keys` are those of all open objects, `opened` tells where each open object's begin, or -1 for a list.
    """
    found[0] = found[3] = -1
    if data[at] != OPENS:
        return ODD
    at += 1
    depth, count, opened[0] = 0, 0, 0
    state, wanted = FIRST_KEY, 0
    while True:
        at = _skip_blanks(data, at, stop)
        if at >= stop:
            return ODD
        byte = data[at]
        in_list = opened[depth] < 0
        if byte == (CLOSES_LIST if in_list else CLOSES) and (state in (FIRST_KEY, FIRST_VALUE, AFTER)):
            if not in_list:
                count = opened[depth]
            at += 1
            depth -= 1
            if depth < 0:
                break
            state = AFTER
        elif state == AFTER:
            if byte != COMMA:
                return ODD
            at += 1
            state = VALUE if in_list else KEY
        elif state in (KEY, FIRST_KEY):
            if byte != QUOTE or count == KEYS:
                return ODD
            at, wanted = _key(data, at + 1, stop, keys, opened[depth], count)
            if at == ODD:
                return ODD
            count += 1
            if depth > 0:
                wanted = 0
            state = VALUE
        elif byte == QUOTE:
            end, escaped = string_end(data, at + 1, stop)
            if end < 0 or (escaped and wanted == ID):
                return ODD
            if wanted == TEXT:
                found[0], found[1], found[2] = at + 1, end - at - 1, end - at - 1 - escaped
            elif wanted == ID:
                found[3], found[4] = at + 1, end - at - 1
            at = end + 1
            state = AFTER
        elif byte in (OPENS, OPENS_LIST):
            if wanted or depth == DEPTH:
                return ODD
            depth += 1
            at += 1
            opened[depth] = count if byte == OPENS else -1
            state = FIRST_KEY if byte == OPENS else FIRST_VALUE
        else:
            end, whole = scalar_end(data, at, stop)
            if end < 0 or wanted == TEXT or (wanted == ID and not whole):
                return ODD
            if wanted == ID:
                found[3], found[4] = at, end - at
            at = end
            state = AFTER
    at = _skip_blanks(data, at, stop)
    if found[0] < 0 or found[3] < 0 or (at < stop and data[at] != FEED):
        return ODD
    return min(at + 1, stop)


@kernel
def _key(data: Bytes, at: int, stop: int, keys: Hashes, first: int, count: int) -> tuple[int, int]:
    """Where the value of the key at `at` begins (`ODD` where it is one of keys[first:count]), and what it names."""
    end, escaped = string_end(data, at, stop)
    if end == ODD or escaped:
        return ODD, 0
    keys[count] = _hash(data, at, end)
    for other in range(first, count):
        if keys[other] == keys[count]:
            return ODD, 0
    after = _skip_blanks(data, end + 1, stop)
    if after >= stop or data[after] != COLON:
        return ODD, 0
    return after + 1, _wanted(data, at, end)


@kernel
def _skip_blanks(data: Bytes, at: int, stop: int) -> int:
    while at < stop and (data[at] == 0x20 or data[at] == 0x09 or data[at] == 0x0D):
        at += 1
    return at


@kernel
def _last_line(data: Bytes, start: int, stop: int) -> int:
    at = stop - 1
    while at > start and data[at - 1] != FEED:
        at -= 1
    return at


@kernel
def _line_end(data: Bytes, at: int, stop: int) -> int:
    while at < stop and data[at] != FEED:
        at += 1
    return min(at + 1, stop)


@kernel
def hash_strings(data: Bytes, offsets: NDArray[np.int32], out: Hashes) -> None:
    """A hash of each string of an Arrow array."""
    for at in range(len(out)):
        out[at] = _hash(data, offsets[at], offsets[at + 1])


@kernel
def _hash(data: Bytes, at: int, end: int) -> np.uint64:
    value = np.uint64(end - at)
    for place in range(at, end):
        value = (value ^ np.uint64(data[place])) * FACTOR
    return mix64(value)


@kernel
def _wanted(data: Bytes, at: int, end: int) -> int:
    if end - at == 2 and data[at] == 0x69 and data[at + 1] == 0x64:
        return ID
    if end - at == 4 and data[at] == 0x74 and data[at + 1] == 0x65 and data[at + 2] == 0x78 and data[at + 3] == 0x74:
        return TEXT
    return 0
