"""When two texts are the same: normalisation, and the part of a text that says something of its own."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence

# A line that this share of a source's texts has, and this many of them, is its form, not its content.
BOILERPLATE_SHARE = 0.1
BOILERPLATE_COUNT = 20

_BLANKS = re.compile(r"[^\S\n]+")
_BREAKS = re.compile(r"\s*\n\s*")


def lines(text: str) -> str:
    """Canonical composition, case folded, blanks collapsed, one kind of line break, no empty lines."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if not text.isascii():
        text = unicodedata.normalize("NFC", text.replace("\x85", "\n").replace("\u2028", "\n").replace("\u2029", "\n"))
    return _BREAKS.sub("\n", _BLANKS.sub(" ", text.casefold())).strip()


def key(text: str) -> str:
    """Two texts with one key are exact duplicates: as `lines`, with line breaks counting as blanks."""
    return lines(text).replace("\n", " ")


def distinctive(texts: Sequence[str], sources: Sequence[str]) -> list[str]:
    """Texts (as `lines` gives them) without the lines that many texts of their source share.

    An instruction that stands before every example would make any two of them near duplicates. A text of nothing
    but such lines stays whole.
    """
    counts: dict[str, Counter[str]] = {}
    totals: Counter[str] = Counter(sources)
    for text, source in zip(texts, sources, strict=True):
        counts.setdefault(source, Counter()).update(set(text.split("\n")))
    form = {
        source: {line for line, n in count.items() if n >= max(BOILERPLATE_COUNT, BOILERPLATE_SHARE * totals[source])}
        for source, count in counts.items()
    }
    own = []
    for text, source in zip(texts, sources, strict=True):
        if form[source]:
            text = "\n".join(line for line in text.split("\n") if line not in form[source]) or text
        own.append(text)
    return own
