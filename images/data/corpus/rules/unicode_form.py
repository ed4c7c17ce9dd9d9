"""Unicode: one way to write each character, and text that was decoded wrongly once mended or given up."""

from __future__ import annotations

import re
import unicodedata

from corpus.rules import Drop, Verdict, rule

# UTF-8 that was read as cp1252: a lead byte's character before a continuation byte's. Rare in any language.
_MOJIBAKE = re.compile(
    "[\u00c2-\u00f4][\u0080-\u00bf\u20ac\u201a\u0192\u201e\u2026\u2020\u2021\u02c6\u2030\u0160\u2039\u0152\u017d\u2018"
    "\u2019\u201c\u201d\u2022\u2013\u2014\u02dc\u2122\u0161\u203a\u0153\u017e\u0178]"
)
_REPLACEMENT = "\ufffd"


@rule
def unicode_form(text: str, *, max_replacements: int = 0) -> Verdict:
    """Bring text into canonical composition (NFC), and mend UTF-8 that was once read as cp1252 or Latin-1.

    Text with more replacement characters than allowed is dropped: what stood there is lost. Compatibility forms,
    joiners and variation selectors stay: emoji sequences and full-width letters are meant. To be listed before
    `control_characters`, which would take away half of what is mended here.
    """
    if text.isascii():
        return None
    lost = text.count(_REPLACEMENT)
    if lost > max_replacements:
        return Drop(f"{lost} replacement characters: the text was decoded wrongly before it came here")
    mended = unicodedata.normalize("NFC", mend(text))
    return mended if mended != text else None


def mend(text: str) -> str:
    """Text that was encoded as UTF-8 and decoded as cp1252, decoded rightly; any other text as it is."""
    for _ in range(3):  # it happens twice to some texts
        if not _MOJIBAKE.search(text):
            break
        try:
            mended = _as_read(text).decode("utf-8")
        except (UnicodeEncodeError, UnicodeDecodeError):
            break  # some of it is right: mending the whole would break that
        text = mended
    return text


def _as_read(text: str) -> bytes:
    """The bytes that gave this text: cp1252, and Latin-1 for the five bytes that cp1252 leaves open."""
    return b"".join(
        character.encode("latin-1") if 0x80 <= ord(character) <= 0x9F else character.encode("cp1252")
        for character in text
    )
