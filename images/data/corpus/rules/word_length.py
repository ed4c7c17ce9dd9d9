"""Length of words: below it are tables and broken text, above it are addresses, hashes and text without blanks."""

from __future__ import annotations

from corpus.blanks import spaced
from corpus.rules import Drop, Verdict, rule


@rule
def word_length(text: str, *, min_mean: float = 3.0, max_mean: float = 10.0, min_words: int = 50) -> Verdict:
    """Drop text whose words have too few or too many characters in the mean.

    Source: Rae et al. 2021 (Gopher), section A1.1: 3 to 10, of texts of at least 50 words. Only words between blanks
    can be judged: texts in Chinese, Japanese, Korean, Thai and the like stay, and those of fewer than `min_words`.
    """
    words = spaced(text)
    if len(words) < max(1, min_words):
        return None
    mean = sum(map(len, words)) / len(words)
    if min_mean <= mean <= max_mean:
        return None
    return Drop(f"its words have {mean:.1f} characters in the mean, {min_mean:g} to {max_mean:g} are allowed")
