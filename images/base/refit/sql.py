"""SQL is SQL: statements live in `sql/`, and code calls them by name."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

_NAME = re.compile(r"^--\s*name:\s*(\w+)\s*$", re.MULTILINE)


def folder() -> Path:
    """The `sql` folder: REFIT_SQL, or the checkout's own."""
    given = os.environ.get("REFIT_SQL")
    return Path(given) if given else Path(__file__).resolve().parents[3] / "sql"


@cache
def queries() -> dict[str, str]:
    """Every named statement of `sql/queries/*.sql`.

    Raises:
        ValueError: a name is used twice.
    """
    found: dict[str, str] = {}
    for path in sorted((folder() / "queries").glob("*.sql")):
        parts = _NAME.split(path.read_text(encoding="utf-8"))
        for name, text in zip(parts[1::2], parts[2::2], strict=True):
            if name in found:
                raise ValueError(f"{path}: the query {name} is there twice")
            found[name] = text.strip().rstrip(";")
    return found


def query(name: str) -> str:
    """A statement by its name."""
    try:
        return queries()[name]
    except KeyError:
        raise ValueError(f"no query named {name} in {folder() / 'queries'}") from None


@cache
def metric(name: str) -> str:
    """A business metric by its name: the whole of `sql/metrics/<name>.sql`, one statement.

    Takes %(rollout)s; gives one row a step and side: step, assigned, users, mean, variance (of one value a user,
    between 0 and 1), events, newest.
    """
    path = folder() / "metrics" / f"{name}.sql"
    try:
        return path.read_text(encoding="utf-8").strip().rstrip(";")
    except FileNotFoundError:
        known = ", ".join(sorted(file.stem for file in path.parent.glob("*.sql")))
        raise ValueError(f"no metric named {name} in {path.parent}; there are: {known}") from None
