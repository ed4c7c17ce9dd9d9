"""What the page of bad records shows, from Postgres: the data jobs that met some, how many of which kind, samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from operators import projection
from operators.links import page_of
from refit.errors import RefitError
from refit.sql import query
from refit.store import join, store_for

Rows = list[dict[str, Any]]
Allowed = Callable[[str], bool]

SAMPLES = 100
"""Samples that are shown at once."""

DOCS = "data_docs/index.html"


class Away(Exception):
    """Postgres does not answer; the message says why."""


def jobs(*, readable: Allowed) -> Rows:
    """The data jobs with bad records of the lines that may be read, the newest first.

    Raises:
        Away: the history cannot be asked.
    """
    return [row for row in _ask("quarantine_jobs") if readable(row["pipeline"])]


def job(name: str, *, source: str | None, kind: str | None, readable: Allowed) -> dict[str, Any] | None:
    """A job's bad records: counts by source and kind, samples (of a source and kind, if one is named), its Data Docs.

    None where there is no such job, or its line may not be read.

    Raises:
        Away: the history cannot be asked.
    """
    found = _ask("quarantine_job", job=name)
    if not found or not readable(found[0]["pipeline"]):
        return None
    folders = _ask("quarantine_folders", job=name)
    return {
        **found[0],
        "kinds": _ask("quarantine_kinds", job=name),
        "samples": _ask("quarantine_samples", job=name, source=source, kind=kind, most=SAMPLES),
        "folders": [{"phase": row["dataset"].split("/")[-2], "page": page_of(row["dataset"]), "records": row["records"]}
                    for row in folders],
        "docs": next((page for row in folders if (page := _docs(row["dataset"]))), ""),
    }  # fmt: skip


def _docs(folder: str) -> str:
    uri = join(folder, DOCS)
    try:
        return page_of(uri) if store_for(uri).exists(uri) else ""
    except (RefitError, OSError):
        return ""


def _ask(name: str, **values: Any) -> Rows:
    if not projection.configured():
        return []
    import psycopg
    from psycopg.rows import dict_row

    try:
        with projection.connection() as database:
            database.read_only = True
            return database.cursor(row_factory=dict_row).execute(query(name).encode(), values).fetchall()
    except psycopg.Error as error:
        raise Away(str(error).strip().splitlines()[0]) from error
