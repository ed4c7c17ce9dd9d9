"""Shape of lines: a page of bullets is a menu, a page of ellipses a list of teasers."""

from __future__ import annotations

import re

from corpus.rules import Drop, Verdict, rule

_BULLET = re.compile(r"[•‣⁃●○◦▪■*·-]\s|[•‣⁃●○◦▪■]")
_ELLIPSIS = ("...", "…")


@rule
def line_shape(text: str, *, max_bullets: float = 0.9, max_ellipses: float = 0.3, min_lines: int = 5) -> Verdict:
    """Drop text of which too many lines begin with a bullet or end with an ellipsis; empty lines do not count.

    Source: Rae et al. 2021 (Gopher), section A1.1: 90 % and 30 %. Fewer than `min_lines` lines are too few to judge:
    a short list is a good answer. A rule for pages; it works in any script.
    """
    lines = [line for line in map(str.strip, text.splitlines()) if line]
    if len(lines) < max(1, min_lines):
        return None
    bullets = sum(bool(_BULLET.match(line)) for line in lines) / len(lines)
    if bullets > max_bullets:
        return Drop(f"{bullets:.0%} of lines begin with a bullet")
    ellipses = sum(line.endswith(_ELLIPSIS) for line in lines) / len(lines)
    return Drop(f"{ellipses:.0%} of lines end with an ellipsis") if ellipses > max_ellipses else None
