"""Symbols: hash signs and ellipses in every sentence are tags and cut-off teasers."""

from __future__ import annotations

import re

from corpus.blanks import counted
from corpus.rules import Drop, Verdict, rule

# Chinese writes an ellipsis as two of the character: a run is one.
_SYMBOLS = {"hash signs": re.compile("#"), "ellipses": re.compile(r"\.{3,}|…+")}


@rule
def symbol_ratio(text: str, *, max_ratio: float = 0.1, min_words: int = 50) -> Verdict:
    """Drop text with more hash signs, or more ellipses, than this share of its words.

    Source: Rae et al. 2021 (Gopher), section A1.1: 0.1 for either. A character of a script without blanks is a word.
    """
    words = counted(text)
    if words < max(1, min_words):
        return None
    for name, pattern in _SYMBOLS.items():
        found = len(pattern.findall(text))
        if found > max_ratio * words:
            return Drop(f"{found} {name} in {words} words")
    return None
