"""Words between blanks, of the scripts that put blanks between words: what rules made for English can judge."""

from __future__ import annotations

import re

_SHARE = 0.1

# Thai to Tibetan, Myanmar, Khmer, kana, bopomofo, Han: no blanks between words. Hangul: a syllable is one character.
_OTHER = "\u0e00-\u0fff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u3040-\u312f\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff"
_OF_OTHER_SCRIPT = re.compile(f"[{_OTHER}\U00020000-\U0003ffff]")
_CHARACTER = re.compile(f"[{_OTHER}\U00020000-\U0003ffff]|[^\\W{_OTHER}\U00020000-\U0003ffff]+")


def spaced(text: str) -> list[str]:
    """The words of a text that stand between blanks; none where it is in a script that has no blanks, even in part.

    In part: characters of such a script are a tenth as many as words. A few names in such a script are passed over.
    """
    words = [word for word in text.split() if not _OF_OTHER_SCRIPT.search(word)]
    others = sum(1 for _ in _OF_OTHER_SCRIPT.finditer(text))
    return words if others <= _SHARE * len(words) else []


def counted(text: str) -> int:
    """How many words a text has in any script; a character of one without blanks is a word."""
    return sum(1 for _ in _CHARACTER.finditer(text))
