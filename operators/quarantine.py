"""Copies the quarantine of a data job from the store into Postgres, where the page of bad records asks for it.

A folder's quarantine is copied once, whole or not at all, in one transaction: the folder is named by its content, so
another try or run that meets it again only says so. At most `extract.MOST` rows of a folder are copied, of every kind
of reason; the true counts are copied with them, and the parquet file keeps everything.

What it does not do: fail a task. The records are safe in the store, and the run's last task copies again.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from operators import projection
from operators.extract import extract
from refit.errors import RefitError
from refit.job import EVENTS, Job, read_events
from refit.sql import query
from refit.store import join, store_for

if TYPE_CHECKING:
    import psycopg

log = logging.getLogger(__name__)

FILE = "quarantine.parquet"
TOLD = "quarantine"
"""The field of a data job's events that names the folders whose quarantines, together, are all so far."""


def project(job: Job) -> bool:
    """Copy what a data job put into quarantine. False when that must be tried again; nothing is raised."""
    if not projection.configured():
        return True
    import psycopg
    import pyarrow as pa

    try:
        folders = places(job)
        with projection.connection() as database:
            for folder in folders:
                _copy(database, folder)
            database.execute(query("forget_job_quarantines"), {"job": job.id, "datasets": folders})
            for folder in folders:
                database.execute(query("link_job_quarantine"), {"job": job.id, "dataset": folder})
    except (psycopg.Error, RefitError, OSError, pa.ArrowException, KeyError) as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        log.warning("the bad records of %s are not in Postgres yet: %s", job.id, said[0])
        return False
    return True


def places(job: Job) -> list[str]:
    """The folders whose quarantines are the job's: its dataset's, or as far as it came, as its last try said."""
    store = store_for(job.output)
    manifest = store.manifest(job.output)
    if manifest is not None:
        return [manifest.outputs["dataset"]] if "dataset" in manifest.outputs else []
    try:
        events = read_events(store.read(join(job.output, EVENTS)).decode())
    except FileNotFoundError:
        return []
    last = events[-1].get("attempt") if events else None
    told = [event[TOLD] for event in events if event.get("attempt") == last and TOLD in event]
    return [str(folder) for folder in told[-1]] if told else []


def _copy(database: psycopg.Connection[tuple[Any, ...]], folder: str) -> None:
    if database.execute(query("quarantine_known"), {"dataset": folder}).fetchone():
        return
    uri = join(folder, FILE)
    found = extract(store_for(uri).local(uri))
    whole = {"dataset": folder, "records": found.counts.total(), "examples": len(found.rows)}
    if database.execute(query("begin_quarantine"), whole).fetchone() is None:
        return
    with database.cursor() as cursor:
        with cursor.copy(query("add_quarantine_reasons").encode()) as copy:
            for (source, kind), records in found.counts.items():
                copy.write_row((folder, source, kind, records))
        with cursor.copy(query("add_bad_records").encode()) as copy:
            for row in found.rows:
                copy.write_row((folder, *row))
    log.info("%s: %d bad records, %d of them copied", folder, whole["records"], len(found.rows))
