"""Language: a line for some languages learns from texts in these.

py3langid tells them apart: a naive Bayes over n-grams of bytes (Lui and Baldwin 2012), offline, its model NumPy arrays
inside the wheel and no pickle. It is loaded by the first text that is judged.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from corpus.rules import Drop, Verdict, rule
from refit.errors import BadSpec

LIBRARIES = ("py3langid",)

_NO_LANGUAGE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`|(?:https?://|www\.)\S+", re.DOTALL)
_HAN_AND_KANA = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]")
# More characters than these make it no surer, and the time that a page takes grows with them.
_ENOUGH = 4000
# A Han or kana character says about as much as this many letters of an alphabet.
_LETTERS_IN_ONE = 3
# Told apart by the library, and written alike: Wu is taken for Mandarin's short lists and the other way round.
_WRITTEN_ALIKE = {"zh": ("zh", "wuu")}


@rule
def language(text: str, *, keep: str = "en,zh", min_letters: int = 40, min_confidence: float = 0.9) -> Verdict:
    """Drop text that is in none of the languages to keep (ISO 639 codes), where that is as sure as asked.

    Code (Markdown's) and links are passed over, and what comes after some pages. What is left must have `min_letters`
    letters, of which a Han or kana character counts three: fewer are too few to judge, and stay. A text in two
    languages stays for either.
    """
    wanted = _codes(keep)
    said = _NO_LANGUAGE.sub(" ", text)[:_ENOUGH]
    if sum(map(str.isalpha, said)) + (_LETTERS_IN_ONE - 1) * len(_HAN_AND_KANA.findall(said)) < min_letters:
        return None
    told = _identifier().rank(said)
    if sum(share for code, share in told if code in wanted) > 1 - min_confidence:
        return None
    return Drop(f"it is in {told[0][0]} and not in {' or '.join(keep.split(','))}")


@cache
def _codes(keep: str) -> frozenset[str]:
    codes = [code.strip() for code in keep.split(",")]
    unknown = [code for code in codes if code not in _identifier().labels]
    if unknown:
        known = ", ".join(sorted(_identifier().labels))
        raise BadSpec(f"language.keep: there is no {unknown[0]!r}. Known: {known}.")
    return frozenset(same for code in codes for same in _WRITTEN_ALIKE.get(code, (code,)))


@cache
def _identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
