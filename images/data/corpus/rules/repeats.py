"""Repeats: text that says the same words again and again."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from corpus.rules import Drop, Verdict, rule, sieve_of

if TYPE_CHECKING:
    from corpus.shingles import Texts

# Han, kana and hangul are words by the character: those scripts have no blanks, or long words between them.
_WORD = re.compile(
    r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af]|[^\W_\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+"
)


@rule
def repeats(text: str, *, n: int = 5, max_share: float = 0.3, min_words: int = 50) -> Verdict:
    """Drop text in which repeated n-grams cover too much of it.

    Source: Rae et al. 2021 (Gopher), table A1. There 15 % for n = 5 judges web pages; answers with lists, code or sums
    repeat more than that and are good: 0.3 drops below 1 % of alpaca (English and Chinese) and GSM8K, and still what
    says one line again and again. Fewer than `min_words` words are too few to judge: a chorus in a tweet is no fault.
    """
    words = _WORD.findall(text)
    if len(words) < max(min_words, n + 1):
        return None
    share = repeated_share(words, n)
    return Drop(f"{share:.0%} of characters are in repeated {n}-grams") if share > max_share else None


@sieve_of(repeats)
def _says_nothing_twice(texts: Texts, *, n: int, max_share: float, min_words: int) -> Any:
    from corpus import repeated  # brings the compiler; who only names the rule need not wait for it

    return repeated.none(texts, n) if max_share >= 0 else [False] * len(texts)


def repeated_share(words: list[str], n: int) -> float:
    """Share of the characters of words that lie in an n-gram seen before; overlapping ones count once."""
    seen: set[tuple[str, ...]] = set()
    covered = 0
    end = 0  # words before this one are covered already
    for at in range(len(words) - n + 1):
        gram = tuple(words[at : at + n])
        if gram in seen:
            covered += sum(len(word) for word in words[max(at, end) : at + n])
            end = at + n
        seen.add(gram)
    total = sum(len(word) for word in words)
    return covered / total if total else 0.0
