"""When two texts are the same: normalisation, and the part of a text that says something of its own."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from collections.abc import Set as AbstractSet

# A line that this share of a source's texts has, and this many of them, is its form, not its content.
BOILERPLATE_SHARE = 0.1
BOILERPLATE_COUNT = 20


def lines(text: str) -> str:
    """Canonical composition, case folded, blanks collapsed, one kind of line break, no empty lines."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if not text.isascii():
        text = unicodedata.normalize("NFC", text.replace("\x85", "\n").replace("\u2028", "\n").replace("\u2029", "\n"))
    # Words are what blanks part: several times faster than expressions over blanks, of which most are one already.
    return "\n".join(filter(None, (" ".join(line.split()) for line in text.casefold().split("\n"))))


def form(counts: Mapping[str, int], total: int) -> frozenset[str]:
    """The lines that are a source's form: so many of its `total` texts have each."""
    enough = max(BOILERPLATE_COUNT, BOILERPLATE_SHARE * total)
    return frozenset(line for line, count in counts.items() if count >= enough)


def without(text: str, form: AbstractSet[str]) -> str:
    """A text (as `lines` gives it) without the lines that are form. One of nothing but such lines stays whole."""
    return "\n".join(line for line in text.split("\n") if line not in form) or text
