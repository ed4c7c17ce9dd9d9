"""Copies what jobs say of themselves from the store into Postgres, where history is asked for.

A job knows no database; its events.jsonl is the source, and each event has a number, so that copying it twice changes
nothing. Postgres may be away: the callers here go on, and the run's last task copies everything again.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from refit import states
from refit.errors import RefitError
from refit.job import EVENTS, UNTOLD, Job, read_events
from refit.sql import query
from refit.states import State
from refit.store import join, store_for

if TYPE_CHECKING:
    import psycopg

log = logging.getLogger(__name__)

CONNECT_SECONDS = 3


def configured() -> bool:
    """Whether there is a database to write to."""
    return bool(os.environ.get("REFIT_DATABASE_URL"))


@contextmanager
def connection() -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
    """A short transaction on Refit's own database."""
    import psycopg  # only tasks and triggers write; a DAG's import must not pay for it

    with psycopg.connect(os.environ["REFIT_DATABASE_URL"], connect_timeout=CONNECT_SECONDS) as open_connection:
        yield open_connection


def project(job: Job, run_id: str | None = None, *, asked: datetime | None = None) -> bool:
    """Copy a job and its events. True when Postgres has them all; False when it is away (nothing is raised).

    `asked` is given by who has just submitted the job, and is when it was about to: the job waited from then on.
    """
    return _quietly(lambda database: _project(database, job, run_id, asked))


def mark(job: Job, state: State, reason: str) -> bool:
    """Write down what a job could not say itself, because it was killed.

    What it did say comes first. A job that cannot become that stays as it is: it has said better. One that is
    stopped before it ran has failed, for there is nothing to go on with.
    """

    def write(database: psycopg.Connection[tuple[Any, ...]]) -> None:
        with suppress(RefitError, OSError):  # the store may be what is away
            _project(database, job, None)
        # It was submitted, also where that could not be written down.
        _mark(database, job, State.SCHEDULED, f"attempt {job.attempt} was submitted", only=frozenset({State.PENDING}))
        _mark(database, job, state, reason)
        if state is State.SUSPENDED:
            _mark(database, job, State.FAILED, reason, only=frozenset({State.SCHEDULED}))

    return _quietly(write)


def evaluation(**row: Any) -> bool:
    """Write down what a comparison found."""
    row["facts"] = json.dumps(row.get("facts", {}), default=str)
    return _quietly(lambda database: database.execute(query("project_evaluation"), row))


def run(**row: Any) -> bool:
    """Write down how a run ended."""
    row["facts"] = json.dumps(row.get("facts", {}), default=str)

    def write(database: psycopg.Connection[tuple[Any, ...]]) -> None:
        database.execute(query("project_team"), {"team": row["team"]})
        database.execute(query("project_run"), row)

    return _quietly(write)


def alert(level: str, source: str, message: str, *, key: str, pipeline: str | None = None, **details: Any) -> bool:
    """Raise an alert, once per key. `level` is "suspicious" (log and board) or "dangerous" (somebody is told)."""
    row = {
        "level": level, "source": source, "pipeline": pipeline, "message": message, "key": key,
        "details": json.dumps(details, default=str),
    }  # fmt: skip
    log.warning("alert level=%s source=%s pipeline=%s %s", level, source, pipeline, message)
    return _quietly(lambda database: database.execute(query("raise_alert"), row))


def alerted(key: str) -> bool:
    """Whether an alert of this key was raised before; True as well where nobody can be asked."""
    found: list[Any] = []
    asked = _quietly(lambda database: found.extend(database.execute(query("alert_of"), {"key": key}).fetchall()))
    return not asked or bool(found)


def quarantine_node(**row: Any) -> bool:
    """Have a machine avoided from now on."""
    return _quietly(lambda database: database.execute(query("quarantine_node"), row))


def _project(
    database: psycopg.Connection[tuple[Any, ...]], job: Job, run_id: str | None, asked: datetime | None = None
) -> None:
    store = store_for(job.output)
    try:
        events = read_events(store.read(join(job.output, EVENTS)).decode())
    except FileNotFoundError:
        events = []
    manifest = store.manifest(job.output)
    database.execute(query("project_team"), {"team": job.team})
    database.execute(
        query("project_job"),
        {"id": job.id, "kind": job.kind, "pipeline": job.pipeline, "team": job.team, "owner": job.owner,
         "run_id": run_id, "output": job.output},
    )  # fmt: skip
    if asked is not None:
        _copy(database, job, [event for event in events if str(event.get("at")) < asked.isoformat()])
        _submitted(database, job, asked)
    elif not events:
        _pending(database, job, datetime.now(UTC))
    _copy(database, job, events, facts=json.dumps(manifest.facts, default=str) if manifest else None)
    if manifest is not None:  # its success, whatever the last event says: a kill may have come before that was told
        database.execute(
            query("project_commit"),
            {"job": job.id, "devices": _devices(job), "at": manifest.created, "reason": UNTOLD},
        )  # fmt: skip


def _copy(
    database: psycopg.Connection[tuple[Any, ...]], job: Job, events: list[dict[str, Any]], facts: str | None = None
) -> None:
    """Copy what a job said, and have its row say where it stands by that."""
    known = {"job", "sequence", "at", "state", "reason", "attempt"}
    for event in events:
        details = {name: value for name, value in event.items() if name not in known}
        row = {name: event.get(name) for name in known} | {"job": job.id, "details": json.dumps(details)}
        database.execute(query("project_event"), row)
    hosts = [host for event in events if (host := host_of(event))]
    database.execute(
        query("project_state"),
        {"job": job.id, "facts": facts, "devices": _devices(job), "host": hosts[-1] if hosts else None},
    )


def _devices(job: Job) -> int:
    train = job.spec.train
    return train.nodes * train.gpus_per_node if job.kind in ("trial", "smoke", "train", "early") else 0


def _pending(database: psycopg.Connection[tuple[Any, ...]], job: Job, at: datetime) -> None:
    """A job begins as pending, as its row does."""
    database.execute(query("project_pending"), {"job": job.id, "at": at, "attempt": job.attempt})


def _submitted(database: psycopg.Connection[tuple[Any, ...]], job: Job, asked: datetime) -> None:
    """A job is scheduled: for the first time, or once more. One that is said to run is left to what it says itself."""
    _pending(database, job, asked)
    ended = frozenset({State.FAILED, State.SUSPENDED})
    _mark(database, job, State.RETRYING, f"attempt {job.attempt}", only=ended, at=asked)
    _mark(database, job, State.SCHEDULED, f"attempt {job.attempt} is submitted")


def _mark(
    database: psycopg.Connection[tuple[Any, ...]], job: Job, state: State, reason: str,
    *, only: frozenset[State] = frozenset(State), at: datetime | None = None,
) -> None:  # fmt: skip
    """Have a job that stands in one of the states `only` become `state`, if `refit.states` draws that."""
    database.execute(
        query("mark_job"),
        {"id": job.id, "state": state, "reason": reason, "attempt": job.attempt, "at": at or datetime.now(UTC),
         "before": sorted(states.before(state) & only)},
    )  # fmt: skip


def host_of(event: Mapping[str, Any]) -> str | None:
    """The machine that an event says the job is on; older ones have no `node`, and say it at the end of a reason."""
    if "node" in event:
        return str(event["node"])
    before, on, host = str(event.get("reason")).rpartition(" on ")
    return host if on and before.startswith("attempt ") else None


def _quietly(write: Any) -> bool:
    if not configured():
        return True
    import psycopg

    try:
        with connection() as database:
            write(database)
    except psycopg.OperationalError as error:
        log.warning("Postgres is away, history will be written later: %s", str(error).strip().splitlines()[0])
        return False
    return True
