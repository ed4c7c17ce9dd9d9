"""Words of letters: a text of numbers and signs is a table, a log or a dump."""

from __future__ import annotations

from corpus.blanks import spaced
from corpus.rules import Drop, Verdict, rule


@rule
def alphabetic_words(text: str, *, min_share: float = 0.8, min_words: int = 50) -> Verdict:
    """Drop text in which too few words have a letter of any script.

    Source: Rae et al. 2021 (Gopher), section A1.1: 80 % of words, of texts of at least 50. Texts in scripts
    without blanks (Chinese, Japanese, Thai) cannot be judged and stay. A rule for pages: answers with sums and
    numbered lists have fewer, and of alpaca's in English it drops 3.7 %.
    """
    words = spaced(text)
    if len(words) < max(1, min_words):
        return None
    share = sum(any(map(str.isalpha, word)) for word in words) / len(words)
    return Drop(f"{share:.0%} of words have a letter, {min_share:.0%} are needed") if share < min_share else None
