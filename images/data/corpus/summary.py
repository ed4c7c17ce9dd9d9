"""What a `prepare` came to, as one HTML page by itself: the records phase by phase, what each rule did, the doors."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any
from urllib.parse import urlsplit

from corpus.walk import Done
from refit.store import join

NAME = "report.html"
DOCS = "data_docs/index.html"
OUT = "pack"
"""The phase that has its own door, and the dataset."""
WORST = 10
"""So many reasons are shown; the others are in the quarantine file."""

_STYLE = """
:root{color-scheme:light dark} body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.4rem} h2{font-size:1.1rem;margin-top:2rem} table{border-collapse:collapse;width:100%}
td,th{padding:.2rem .8rem .2rem 0;text-align:left} td:first-child,a{white-space:nowrap}
.n{text-align:right;font-variant-numeric:tabular-nums}
td.bar{width:40%} td.bar div{height:.7rem;background:#2563eb;border-radius:2px;min-width:1px}
.met{color:#2e7d32;font-weight:600} .missed{color:#d93025;font-weight:600}
"""


def page(line: str, done: Sequence[Done], doors: Mapping[str, Done], place: str) -> str:
    """The page; everything that comes from data is escaped.

    Args:
        line: whose data it is.
        done: the phases so far, in their order.
        doors: by the phase they are after.
        place: the folder of the store where the page will lie; Data Docs are linked from there.
    """
    parts = [f"<h1>{escape(line)}: what the data stage did</h1>", _phases(done)]
    reasons = [(reason, count) for one in done for reason, count in one.facts.get("reasons", {}).items()]
    if reasons:
        worst = sorted(reasons, key=lambda reason: (-reason[1], reason[0]))[:WORST]
        parts += ["<h2>Why records went to quarantine</h2>", _table(("reason", "records"), worst)]
    rules: dict[str, dict[str, int]] = next((one.facts["rules"] for one in done if one.facts.get("rules")), {})
    if rules:
        counted = [
            (name, *(told.get(key, 0) for key in ("kept", "changed", "dropped"))) for name, told in rules.items()
        ]
        parts += ["<h2>Rules</h2>", _table(("rule", "kept", "changed", "dropped"), counted)]
    parts += ["<h2>Doors</h2>", _doors(done, doors, place)]
    head = f'<!doctype html><meta charset="utf-8"><title>{escape(line)}: data</title><style>{_STYLE}</style>'
    return head + "".join(parts)


def _phases(done: Sequence[Done]) -> str:
    """A bar a phase: of how many records that came, how many are left."""
    most = max((int(one.facts["records_in"]) for one in done), default=0) or 1
    rows = []
    for one in done:
        share = int(one.facts["records_out"]) / most
        told = one.summary()
        cells = [_number(one.facts[name]) for name in ("records_in", "records_out", "quarantined")]
        seconds = "as before" if one.cached else f"{told['seconds']:.1f} s"
        bar = f'<td class="bar"><div style="width:{share:.1%}"></div></td>'
        rows.append(f"<tr><td>{escape(one.phase)}</td>{''.join(cells)}<td class='n'>{seconds}</td>{bar}</tr>")
    head = "".join(f'<th class="n">{name}</th>' for name in ("in", "out", "quarantined", "time"))
    return f"<table><tr><th>phase</th>{head}<th>records left</th></tr>{''.join(rows)}</table>"


def _doors(done: Sequence[Done], doors: Mapping[str, Done], place: str) -> str:
    """Of each door how much was asked and met, what was not, and where its Data Docs are."""
    found = [(f"after {after}", door) for after, door in doors.items()]
    found += [("out", one) for one in done if one.phase == OUT]
    rows = []
    for name, door in found:
        told = door.facts["expectations"]
        missed = told.get("failed", [])
        verdict = (
            "".join(f'<div class="missed">{escape(text)}</div>' for text in missed) or '<span class="met">met</span>'
        )
        docs = _link(join(door.uri, DOCS), place)
        rows.append(
            f"<tr><td>{name}</td>{_number(told['asked'])}{_number(told['met'])}<td>{verdict}</td><td>{docs}</td></tr>"
        )
    head = '<th class="n">asked</th><th class="n">met</th>'
    return f"<table><tr><th>door</th>{head}<th></th><th></th></tr>{''.join(rows)}</table>"


def _link(uri: str, place: str) -> str:
    """Relative, so that it works wherever the store is shown; an address where the two lie in different stores."""
    there, here = urlsplit(uri), urlsplit(place)
    if (there.scheme, there.netloc) != (here.scheme, here.netloc):
        return escape(uri)
    return f'<a href="{escape(posixpath.relpath(there.path, here.path))}">Data Docs</a>'


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    first, *others = head
    top = f"<th>{first}</th>" + "".join(f'<th class="n">{name}</th>' for name in others)
    body = "".join(f"<tr><td>{escape(str(row[0]))}</td>{''.join(map(_number, row[1:]))}</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


def _number(value: int) -> str:
    return f'<td class="n">{value:,}</td>'
