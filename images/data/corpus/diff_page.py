"""A comparison of two datasets as one HTML page by itself: numbers, and bars where a person looks first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Any

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1c2430}
h1{font-size:1.5rem} h2{font-size:1.1rem;margin-top:2rem} table{border-collapse:collapse} code{font-size:.85em}
td,th{padding:.2rem .8rem .2rem 0;text-align:left} td.n{text-align:right;font-variant-numeric:tabular-nums}
svg{display:block;margin:.5rem 0} .moved{color:#b3261e;font-weight:600} .still{color:#2e7d32}
"""
OLD, NEW = "#8a94a3", "#2563eb"
_ROWS = 12


def page(found: Mapping[str, Any]) -> str:
    """The page; everything that comes from data is escaped."""
    old, new, records = found["old"], found["new"], found["records"]
    moved = found["moved"]
    verdict = (
        f'<p class="moved">Moved: {escape(", ".join(moved))}.</p>' if moved else '<p class="still">Nothing moved.</p>'
    )
    parts = [
        f"<h1>How the data moved</h1>{verdict}",
        f'<p>{_swatch(OLD)} old <code>{escape(old["fingerprint"][:12])}</code>, {old["records"]:,} records &nbsp; '
        f'{_swatch(NEW)} new <code>{escape(new["fingerprint"][:12])}</code>, {new["records"]:,}. '
        f"{records['added']:,} came, {records['removed']:,} went, {records['kept']:,} stayed.</p>",
        "<h2>Sides</h2>", _table(("side", "old", "new"), [(s, old["sides"][s], new["sides"][s]) for s in old["sides"]]),
    ]  # fmt: skip
    for name, one in found["lengths"].items():
        parts += [
            f"<h2>Length of the {escape(name)}, in characters ({_measure('PSI', one['psi'], name in moved)})</h2>"
        ]
        parts += [_table(("", "5 %", "median", "95 %"), [(side, *one[side].values()) for side in ("old", "new")])]
        parts += [_bars(_buckets(one["buckets"]))]
    for name, one in found["shares"].items():
        parts += [f"<h2>{escape(name.capitalize())} ({_measure('distance', one['distance'], name in moved)})</h2>"]
        parts += [_bars(list(one["shares"].items())[:_ROWS])]
    words = found["vocabulary"]
    parts += [
        f"<h2>Vocabulary ({_measure('divergence', words['divergence'], 'vocabulary' in moved)})</h2>",
        f"<p>{words['words'][0]:,} → {words['words'][1]:,} different words; {words['unseen_share']:.1%} of the new "
        f"text are words that were never seen.</p><p>New: {escape(', '.join(words['unseen']) or 'none')}.<br>"
        f"Gone: {escape(', '.join(words['gone']) or 'none')}.</p>",
        "<h2>Taken out on the way</h2>", _table(("why", "old", "new"), _removed(found["duplicates"])),
    ]  # fmt: skip
    return (
        f'<!doctype html><meta charset="utf-8"><title>How the data moved</title><style>{_STYLE}</style>{"".join(parts)}'
    )


def _measure(name: str, value: float, moved: bool) -> str:
    return f'<span class="{"moved" if moved else "still"}">{name} {value:.3f}</span>'


def _swatch(colour: str) -> str:
    return f'<svg width="12" height="12" style="display:inline"><rect width="12" height="12" fill="{colour}"/></svg>'


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table><tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>{lines}</table>"


def _cell(value: str | float) -> str:
    return f"<td>{escape(value)}</td>" if isinstance(value, str) else f'<td class="n">{value:,.0f}</td>'


def _removed(duplicates: Mapping[str, Mapping[str, int]]) -> list[tuple[str, int, int]]:
    names = dict.fromkeys([*duplicates["old"], *duplicates["new"]])
    return [(name, duplicates["old"].get(name, 0), duplicates["new"].get(name, 0)) for name in names]


def _buckets(buckets: Mapping[str, Sequence[float]]) -> list[tuple[str, list[float]]]:
    edges = [f"{edge:,.0f}" for edge in buckets["edges"]]
    names = [f"below {edges[0]}", *(f"{a} to {b}" for a, b in pairwise(edges)), f"{edges[-1]} on"]
    sums = [max(1, sum(buckets[side])) for side in ("old", "new")]
    pairs = zip(buckets["old"], buckets["new"], strict=True)
    return [(name, [a / sums[0], b / sums[1]]) for name, (a, b) in zip(names, pairs, strict=True)]


def _bars(rows: Sequence[tuple[str, Sequence[float]]]) -> str:
    """Pairs of bars, the old share above the new."""
    most = max((share for _, shares in rows for share in shares), default=0) or 1
    lines = []
    for number, (name, shares) in enumerate(rows):
        top = number * 34
        lines.append(f'<text x="150" y="{top + 20}" text-anchor="end" font-size="12">{escape(name[:22])}</text>')
        for at, (share, colour) in enumerate(zip(shares, (OLD, NEW), strict=True)):
            y, width = top + 4 + at * 13, 420 * share / most
            lines.append(f'<rect x="158" y="{y}" width="{width:.1f}" height="11" fill="{colour}"/>')
            lines.append(f'<text x="{164 + width:.1f}" y="{y + 10}" font-size="11">{share:.1%}</text>')
    return f'<svg width="660" height="{len(rows) * 34 + 6}" role="img">{"".join(lines)}</svg>'
