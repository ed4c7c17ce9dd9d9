"""Repeated lines: menus, footers and generators that ran wild."""

from __future__ import annotations

from corpus.rules import Drop, Verdict, rule


@rule
def repeated_lines(text: str, *, max_share: float = 0.3, min_lines: int = 5) -> Verdict:
    """Drop text in which too many lines, or lines with too many of its characters, were there before.

    Source: Rae et al. 2021 (Gopher), table A1: 30 % of lines; of characters 20 % there, since web pages are longer
    than answers 30 % here too. Only lines that could be a sentence count: braces and the rules of tables come again in
    good answers.
    """
    lines = [line for line in map(str.strip, text.splitlines()) if _could_be_a_sentence(line)]
    if len(lines) < min_lines:
        return None
    characters = sum(map(len, lines))
    different = set(lines)
    share = max(1 - len(different) / len(lines), 1 - sum(map(len, different)) / characters)
    return Drop(f"{share:.0%} of it are lines that were there before") if share > max_share else None


def _could_be_a_sentence(line: str) -> bool:
    letters = sum(map(str.isalpha, line))
    return (letters >= 12 and letters > len(line) / 2) or (letters >= 6 and not line.isascii())
