"""What the Airflow side writes of jobs and runs, and what the board reads of it, in a real PostgreSQL."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg
import pytest

from operators import projection
from refit import states
from refit.job import EVENTS, Job, JobRun
from refit.manifest import Manifest
from refit.pipeline import validate
from refit.sql import query
from refit.states import State
from refit.store import join

pytestmark = pytest.mark.integration


@pytest.fixture
def job(tmp_path: Path) -> Job:
    spec = validate(
        {
            "name": "line", "title": "A line", "team": "team", "owner": "owner@example.com",
            "data": {"sources": [{"name": "a", "uri": "cache://data/a.jsonl"}]},
            "train": {"base": "cache://models/base", "gpus_per_node": 4},
        },
        "test",
    )  # fmt: skip
    job = Job.build("train", spec, store=tmp_path.as_uri(), output=(tmp_path / "out").as_uri())
    job.save()
    return job


def rows(database: psycopg.Connection[Any], statement: str) -> list[tuple[Any, ...]]:
    return database.execute(statement.encode()).fetchall()


def test_a_job_s_events_are_copied_once_however_often_it_is_done(
    database: psycopg.Connection[Any], job: Job, tmp_path: Path
) -> None:
    run = JobRun(job, tmp_path / "out")
    assert projection.project(job, "r1")
    assert rows(database, "SELECT state, run_id, team FROM jobs") == [("pending", "r1", "team")]
    run.event(State.RUNNING, "attempt 1 on node-7")
    assert projection.project(job)
    run.event(State.SUSPENDED, "sent away")
    for _ in range(3):
        assert projection.project(job)
    told = rows(database, "SELECT sequence, state FROM job_events ORDER BY 1")
    assert told == [(0, "pending"), (1, "running"), (2, "suspended")]
    ((state, reason, host, run_id, ended),) = rows(database, "SELECT state, reason, host, run_id, ended_at FROM jobs")
    assert (state, reason, host, run_id) == ("suspended", "sent away", "node-7", "r1")
    assert ended is not None


def test_cards_cost_as_long_as_the_job_has_them(database: psycopg.Connection[Any], job: Job, tmp_path: Path) -> None:
    lines = [
        {
            "job": job.id,
            "sequence": 1,
            "at": "2026-11-29T12:00:00+00:00",
            "state": "running",
            "reason": "",
            "attempt": 1,
        },
        {
            "job": job.id,
            "sequence": 2,
            "at": "2026-11-29T12:01:00+00:00",
            "state": "failed",
            "reason": "",
            "attempt": 1,
        },
    ]
    (tmp_path / "out" / EVENTS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    projection.project(job)
    assert rows(database, "SELECT device_seconds FROM jobs") == [(240,)]


def test_a_killed_job_is_marked_and_a_success_stays_one(
    database: psycopg.Connection[Any], job: Job, tmp_path: Path
) -> None:
    run = JobRun(job, tmp_path / "out")
    run.event(State.RUNNING, "attempt 1 on a")
    projection.project(job)
    projection.mark(job, State.RETRYING, "node lost")
    assert rows(database, "SELECT state, reason FROM jobs") == [("retrying", "node lost")]
    run.commit(Manifest(kind="training", fingerprint="f", facts={"loss": 0.5}))
    run.event(State.SUCCEEDED, "manifest written")
    projection.project(job)
    projection.mark(job, State.FAILED, "too late")
    assert rows(database, "SELECT state, facts->>'loss' FROM jobs") == [("succeeded", "0.5")]


def test_a_job_that_was_killed_after_its_manifest_has_succeeded_and_cost_its_time(
    database: psycopg.Connection[Any], job: Job, tmp_path: Path
) -> None:
    """Its last event says that it runs, and nobody is left to say anything else."""
    run = JobRun(job, tmp_path / "out")
    run.event(State.RUNNING, "attempt 1 on a")
    projection.project(job)
    later = datetime.now(UTC) + timedelta(hours=1)
    run.commit(Manifest(kind="training", fingerprint="f", facts={"loss": 0.5}, created=later))
    for _ in range(2):
        projection.project(job)
        projection.mark(job, State.RETRYING, "node lost")
    ((state, ended, spent, loss),) = rows(
        database, "SELECT state, ended_at, device_seconds, facts->>'loss' FROM jobs"
    )  # fmt: skip
    assert (state, ended, loss) == ("succeeded", later, "0.5")
    assert float(spent) == pytest.approx(4 * 3600, abs=60)


@pytest.mark.parametrize("now", list(State))
@pytest.mark.parametrize("then", [State.RETRYING, State.FAILED, State.SUSPENDED])
def test_a_mark_is_an_event_and_never_a_change_that_is_not_drawn(
    database: psycopg.Connection[Any], job: Job, now: State, then: State
) -> None:
    """A failed job became suspended, and nothing told of it but the job's row."""
    projection.project(job)
    database.execute("UPDATE jobs SET state = %s", (now,))
    before = rows(database, "SELECT count(*) FROM job_events")
    with projection.connection() as opened:
        projection._mark(opened, job, then, "gone")
    drawn = then in states.NEXT[now]
    assert rows(database, "SELECT state FROM jobs") == [(then if drawn else now,)]
    assert rows(database, "SELECT count(*) FROM job_events") == [(before[0][0] + drawn,)]


def test_a_mark_stays_until_the_job_itself_says_more(
    database: psycopg.Connection[Any], job: Job, tmp_path: Path
) -> None:
    """The run's last task copies everything once more: a job that was killed ran again then, for ever."""
    run = JobRun(job, tmp_path / "out")
    run.event(State.RUNNING, "attempt 1 on a")
    projection.mark(job, State.FAILED, "killed")
    projection.project(job)
    assert rows(database, "SELECT state, reason, attempt FROM jobs") == [("failed", "killed", 1)]
    again = JobRun(job.model_copy(update={"attempt": 2}), tmp_path / "out")
    again.again(alone=True)
    again.event(State.RUNNING, "attempt 2 on b")
    projection.project(again.job)
    told = rows(database, "SELECT state, attempt FROM job_events ORDER BY sequence, mark")
    assert told[-4:] == [("running", 1), ("failed", 1), ("retrying", 2), ("running", 2)]
    assert rows(database, "SELECT state, attempt, ended_at FROM jobs") == [("running", 2, None)]


def test_what_a_job_said_while_it_was_stopped_comes_before_the_mark(
    database: psycopg.Connection[Any], job: Job, tmp_path: Path
) -> None:
    run = JobRun(job, tmp_path / "out")
    run.event(State.RUNNING, "attempt 1 on a")
    projection.project(job)
    run.event(State.SUSPENDED, "told to stop; step 4 is in a checkpoint")
    for _ in range(2):
        projection.mark(job, State.SUSPENDED, "stopped")
        projection.project(job)
    told = rows(database, "SELECT state, reason FROM job_events ORDER BY sequence, mark")
    assert told[-2:] == [("running", "attempt 1 on a"), ("suspended", "told to stop; step 4 is in a checkpoint")]


@pytest.mark.parametrize("written", [True, False])
def test_a_job_that_is_stopped_before_it_ran_has_failed_and_one_that_is_lost_is_retried(
    database: psycopg.Connection[Any], job: Job, written: bool
) -> None:
    """Also where the database was away when they were submitted."""
    other = job.model_copy(update={"id": "lost"})
    for one in (job, other) if written else ():
        projection.project(one, asked=datetime.now(UTC))
    projection.mark(job, State.SUSPENDED, "stopped")
    projection.mark(other, State.RETRYING, "node lost")
    assert rows(database, "SELECT state, reason FROM jobs ORDER BY id = 'lost'") == [
        ("failed", "stopped"), ("retrying", "node lost")
    ]  # fmt: skip
    assert rows(database, "SELECT state FROM job_events WHERE job = 'lost' ORDER BY sequence, mark") == [
        ("pending",), ("scheduled",), ("retrying",)
    ]  # fmt: skip


def told_of(database: psycopg.Connection[Any]) -> list[State]:
    """What the history of the one job says, each change one that is drawn."""
    said = [State(state) for (state,) in rows(database, "SELECT state FROM job_events ORDER BY sequence, mark")]
    assert all(then in states.NEXT[now] for now, then in pairwise(said)), said
    return said


def test_a_job_waits_and_is_scheduled_before_it_runs_and_again_before_it_is_retried(
    database: psycopg.Connection[Any], job: Job, tmp_path: Path
) -> None:
    """Nothing told how long a job had waited, nor that a new try was on its way."""
    asked = datetime.now(UTC)
    projection.project(job, "r1", asked=asked)
    assert rows(database, "SELECT state, started_at, device_seconds FROM jobs") == [("scheduled", None, 0)]
    assert rows(database, "SELECT at FROM job_events WHERE state = 'pending'") == [(asked,)]
    run = JobRun(job, tmp_path / "out")
    run.event(State.RUNNING, "attempt 1 on a")
    projection.project(job)
    projection.mark(job, State.RETRYING, "killed")
    second = job.model_copy(update={"attempt": 2})
    projection.project(second, "r1", asked=datetime.now(UTC))
    assert rows(database, "SELECT state, attempt FROM jobs") == [("scheduled", 2)]
    again = JobRun(second, tmp_path / "out")
    again.again(alone=True)
    again.event(State.RUNNING, "attempt 2 on a")
    again.event(State.FAILED, "diverged")
    projection.project(second)
    projection.mark(second, State.FAILED, "diverged")
    projection.project(job, "r2", asked=datetime.now(UTC))
    assert told_of(database) == [
        "pending", "scheduled", "running", "retrying", "scheduled", "retrying", "running", "failed", "retrying",
        "scheduled",
    ]  # fmt: skip
    assert rows(database, "SELECT state, run_id, ended_at FROM jobs") == [("scheduled", "r2", None)]


def test_a_history_that_begins_late_is_in_order(database: psycopg.Connection[Any], job: Job, tmp_path: Path) -> None:
    """The database was away for the first try, and the second had begun before it was told of."""
    run = JobRun(job, tmp_path / "out")
    run.event(State.RUNNING, "attempt 1 on a")
    run.event(State.SUSPENDED, "told to stop")
    asked = datetime.now(UTC)
    run.again()
    run.event(State.RUNNING, "attempt 2 on a")
    for _ in range(2):
        projection.project(job, "r1", asked=asked)
    assert told_of(database) == ["running", "suspended", "retrying", "scheduled", "retrying", "running"]
    assert rows(database, "SELECT state FROM jobs") == [("running",)]


def test_a_run_is_rewritten_by_its_last_word_and_an_alert_is_raised_once(database: psycopg.Connection[Any]) -> None:
    row = {"id": "line/r1", "pipeline": "line", "team": "team", "started_at": None, "ended_at": "2026-11-29T12:00:00Z"}
    projection.run(**row, outcome="failed", why="a", facts={})
    projection.run(**row, outcome="promoted", why="b", facts={"x": 1})
    assert rows(database, "SELECT outcome, why FROM runs") == [("promoted", "b")]
    for _ in range(2):
        projection.alert("suspicious", "test", "something", key="k", pipeline="line")
    assert rows(database, "SELECT count(*) FROM alerts") == [(1,)]


def test_a_database_that_is_away_fails_no_job(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFIT_DATABASE_URL", "postgresql://refit@127.0.0.1:9/refit")
    assert projection.project(job) is False
    assert projection.mark(job, State.FAILED, "x") is False


def test_the_board_reads_what_was_written(database: psycopg.Connection[Any], job: Job, tmp_path: Path) -> None:
    JobRun(job, tmp_path / "out").event(State.RUNNING, "attempt 1 on a")
    projection.project(job, "r1")
    comparison = {"verdict": "pass", "why": "better", "report": join(job.store, "report.html"),
                  "candidate": {"release": "c", "score": 0.9}, "champion": {"release": "o", "score": 0.8},
                  "difference": {"value": 0.1, "low": 0.05, "high": 0.15}}  # fmt: skip
    projection.evaluation(id="e", pipeline="line", release="c", champion="o", run_id="r1", verdict="pass", forced=False,
                          score=0.9, low=0.8, high=1.0, report=comparison["report"], facts=comparison)  # fmt: skip
    cursor = database.cursor(row_factory=psycopg.rows.dict_row)
    (going,) = cursor.execute(query("board_runs").encode()).fetchall()
    assert (going["run_id"], going["outcome"], going["candidate"]["score"]) == ("r1", None, 0.9)
    projection.run(id="line/r1", pipeline="line", team="team", outcome="promoted", why="", started_at=None,
                   ended_at="2026-11-29T12:00:00Z", facts={"comparison": comparison})  # fmt: skip
    (ended,) = cursor.execute(query("board_runs").encode()).fetchall()
    assert (ended["outcome"], ended["difference"]["low"], ended["verdict"]) == ("promoted", 0.05, "pass")
    (running,) = cursor.execute(query("board_jobs").encode()).fetchall()
    assert (running["id"], running["state"]) == (job.id, "running")
    for name in ("board_devices", "board_alerts", "board_rollouts"):
        assert cursor.execute(query(name).encode()).fetchall() == []
