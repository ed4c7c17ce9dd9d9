"""Control characters: leftovers of terminals, broken encodings and binary files."""

from __future__ import annotations

import re

from corpus.rules import Drop, Verdict, rule

# C0 without tab, line feed and carriage return; DEL; C1. Joiners and selectors are none of them: emoji stay whole.
_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


@rule
def control_characters(text: str, *, max_share: float = 0.02) -> Verdict:
    """Take control characters out; drop a text that has so many that it is not text."""
    found = len(_CONTROLS.findall(text))
    if not found:
        return None
    if found > max_share * len(text) and found > 1:
        return Drop(f"{found} of {len(text)} characters are control characters")
    return _CONTROLS.sub("", text)
