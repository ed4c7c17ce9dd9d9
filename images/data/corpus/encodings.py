"""Which encoding a file is in: what its mark says, else UTF-8 where its bytes allow it, else what they look like.

A single wrong byte makes no other encoding: UTF-8 is only given up where most of what is not ASCII is not UTF-8.
"""

from __future__ import annotations

import codecs

SAMPLE_BYTES = 64 << 10
LEGACY = ("gb18030", "big5", "shift_jis", "euc_kr", "cp1251", "cp1252")
"""What deliveries were seen in; a detector that may choose among a hundred finds one of the others too often."""
MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
    (codecs.BOM_UTF8, "utf-8"),
)


def detect(start: bytes) -> str:
    """The encoding of a file that begins so; "utf-8" where nothing speaks for another."""
    for mark, name in MARKS:
        if start.startswith(mark):
            return name
    if wide := _utf16_without_mark(start):
        return wide
    if _is_mostly_utf8(start):
        return "utf-8"
    # Only for the few files that need it: its tables take a tenth of a second to load.
    from charset_normalizer import from_bytes

    found = from_bytes(start, cp_isolation=list(LEGACY)).best()
    return found.encoding if found else "utf-8"


def is_by_line(encoding: str) -> bool:
    """Whether a line feed is one byte that is part of no other character, so that lines can be cut before decoding."""
    return not encoding.startswith(("utf-16", "utf-32"))


def _utf16_without_mark(start: bytes) -> str | None:
    """JSON and csv begin with ASCII: in UTF-16 every other byte of that is zero."""
    zeros = [place for place, byte in enumerate(start[:8]) if byte == 0]
    return "utf-16-le" if zeros == [1, 3, 5, 7] else "utf-16-be" if zeros == [0, 2, 4, 6] else None


def _is_mostly_utf8(start: bytes) -> bool:
    beyond = sum(byte >= 0x80 for byte in start)
    if not beyond:
        return True
    text = start.decode("utf-8", "replace")
    # The sample may end within a character.
    wrong = text.count("\ufffd") - start.count("\ufffd".encode()) - text.endswith("\ufffd")
    return wrong <= 0.1 * beyond
