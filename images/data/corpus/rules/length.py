"""Length: nothing said, or a whole file pasted."""

from __future__ import annotations

import unicodedata

from corpus.rules import Drop, Verdict, rule


@rule
def length(text: str, *, min_chars: int = 1, max_chars: int = 100_000) -> Verdict:
    """Drop text that is too long, or has too few characters that say something.

    Letters, digits and symbols (an emoji, a plus sign) say something; blanks and punctuation alone do not.
    """
    if len(text) > max_chars:
        return Drop(f"{len(text)} characters, at most {max_chars} are allowed")
    said = 0
    for character in text:
        # Categories L(etter), M(ark), N(umber), S(ymbol).
        said += unicodedata.category(character)[0] in "LMNS"
        if said >= min_chars:
            return None
    return Drop(f"{said} letters, digits or symbols, at least {min_chars} are needed")
