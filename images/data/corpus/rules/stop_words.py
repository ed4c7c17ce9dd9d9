"""Stop words: prose cannot do without them; lists of keywords, menus and catalogues can."""

from __future__ import annotations

import re

from corpus.blanks import spaced
from corpus.rules import Drop, Verdict, rule

_EDGES = re.compile(r"^\W+|\W+$")


@rule
def stop_words(
    text: str, *, words: str = "the,be,to,of,and,that,have,with", min_different: int = 2, min_words: int = 50
) -> Verdict:
    """Drop text in which fewer than so many of these words occur.

    Source: Rae et al. 2021 (Gopher), section A1.1: two of eight English words. For another language name its own; for
    several name them all. Texts in scripts without blanks (Chinese, Japanese, Thai) cannot be judged and stay.
    """
    said = spaced(text)
    if len(said) < max(1, min_words):
        return None
    wanted = {word.strip().casefold() for word in words.split(",")}
    found = wanted.intersection(_EDGES.sub("", word).casefold() for word in said)
    if len(found) >= min_different:
        return None
    return Drop(f"{len(found)} different stop words, {min_different} are needed")
