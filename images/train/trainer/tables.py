"""A plan as people read it: names, values and reasons in columns, and below them what does not belong to one line."""

from __future__ import annotations

import sys
from collections.abc import Iterable

Row = tuple[str, str, str]


def show(rows: Iterable[Row], remarks: Iterable[str]) -> None:
    """Print a table of name, value and reason (may be empty), and remarks, for people, on stderr."""
    rows = list(rows)
    name_width = max(len(name) for name, _, _ in rows)
    value_width = max((len(value) for _, value, reason in rows if reason), default=0)
    for name, value, reason in rows:
        print(f"  {name:<{name_width}}  {value:<{value_width}}  {reason}".rstrip(), file=sys.stderr)
    for remark in remarks:
        print(f"  - {remark}", file=sys.stderr)


def gib(size: float) -> str:
    """A size in bytes, in GiB."""
    return f"{size / (1 << 30):.2f} GiB"
