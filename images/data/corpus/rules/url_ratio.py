"""Links: a text that is mostly addresses teaches addresses."""

from __future__ import annotations

import re

from corpus.rules import Drop, Verdict, rule

_URL = re.compile(r"(?:https?://|www\.)[^\s<>\"')\]]+", re.IGNORECASE)


@rule
def url_ratio(text: str, *, max_share: float = 0.5) -> Verdict:
    """Drop text of which more than this share of characters are links."""
    if "://" not in text and "www." not in text.lower():
        return None
    linked = sum(len(match) for match in _URL.findall(text))
    share = linked / len(text)
    return Drop(f"{share:.0%} of characters are links") if share > max_share else None
