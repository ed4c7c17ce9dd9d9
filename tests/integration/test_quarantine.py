"""Bad records in a real PostgreSQL: copied once, whatever they hold, and never at a task's cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest

from corpus.quarantine import Quarantine
from operators import projection, quarantine
from refit.job import Job, JobRun
from refit.manifest import Manifest
from refit.pipeline import validate
from refit.sql import query
from refit.states import State
from refit.store import join, store_for

pytestmark = pytest.mark.integration

HOSTILE = [
    "<script>alert(1)</script>", "nul \0 byte", "lone \ud800 surrogate", "x" * 1_000_000, "tab\tand\\N and\nline",
    "'; --",
]  # fmt: skip


@pytest.fixture
def job(tmp_path: Path) -> Job:
    spec = validate(
        {
            "name": "line", "title": "A line", "team": "team", "owner": "owner@example.com",
            "data": {"sources": [{"name": "a", "uri": "cache://data/a.jsonl"}]},
            "train": {"base": "cache://models/base"},
        },
        "test",
    )  # fmt: skip
    store = (tmp_path / "store").as_uri()
    made = Job.build("prepare", spec, store=store, output=join(store, "jobs/line/r1/prepare"))
    made.save()
    return made


def folder_with(job: Job, phase: str, samples: list[str], kind: str = "records") -> str:
    uri = join(job.store, "datasets/line", phase, "f" * 32)
    with store_for(uri).publish(uri) as draft:
        with Quarantine(draft.path / quarantine.FILE) as bad:
            for number, sample in enumerate(samples):
                bad.add("mail", "part.jsonl", number, f"reason {number % 2}: {sample}", sample)
        draft.commit(Manifest(kind=kind, fingerprint="f" * 32))
    return uri


def finished(job: Job, samples: list[str]) -> str:
    dataset = folder_with(job, "pack", samples, "dataset")
    JobRun(job, store_for(job.output).local(job.output)).commit(
        Manifest(kind="prepare", fingerprint="f", outputs={"dataset": dataset})
    )
    projection.project(job, "r1")
    return dataset


def rows(database: psycopg.Connection[Any], statement: str) -> list[tuple[Any, ...]]:
    return database.execute(statement.encode()).fetchall()


def test_a_second_try_and_a_second_run_add_no_record(database: psycopg.Connection[Any], job: Job) -> None:
    dataset = finished(job, HOSTILE)
    again = job.model_copy(update={"id": "another", "output": join(job.store, "jobs/line/r2/prepare")})
    manifest = store_for(job.output).manifest(job.output)
    assert manifest
    again.save()
    JobRun(again, store_for(again.output).local(again.output)).commit(manifest)
    projection.project(again, "r2")
    assert all(quarantine.project(one) for one in (job, job, again, again))
    assert rows(database, "SELECT count(*) FROM bad_records") == [(len(HOSTILE),)]
    assert rows(database, "SELECT dataset, records, examples FROM quarantines") == [(dataset, len(HOSTILE), 6)]
    assert rows(database, "SELECT job FROM job_quarantines ORDER BY 1") == [("another",), (job.id,)]


def test_whatever_a_sample_holds_it_arrives_as_text(database: psycopg.Connection[Any], job: Job) -> None:
    finished(job, HOSTILE)
    assert quarantine.project(job)
    kept = [sample for (sample,) in rows(database, "SELECT sample FROM bad_records ORDER BY number")]
    assert kept == [
        "<script>alert(1)</script>", "nul ␀ byte", "lone \\ud800 surrogate", "x" * 200, "tab\tand\\N and\nline",
    "'; --",
    ]  # fmt: skip
    assert rows(database, "SELECT kind, records FROM quarantine_reasons ORDER BY 1") == [
        ("reason 0", 3),
        ("reason 1", 3),
    ]


def test_a_million_records_stay_bounded_and_their_count_is_true(database: psycopg.Connection[Any], job: Job) -> None:
    dataset = finished(job, ["x"] * 1_000_000)
    assert quarantine.project(job)
    assert rows(database, "SELECT dataset, records, examples FROM quarantines") == [(dataset, 1_000_000, 10_000)]
    assert rows(database, "SELECT kind, count(*) FROM bad_records GROUP BY 1 ORDER BY 1") == [
        ("reason 0", 5_000), ("reason 1", 5_000),
    ]  # fmt: skip


def test_a_refused_job_s_phases_are_found_by_its_events(database: psycopg.Connection[Any], job: Job) -> None:
    ingest, clean = folder_with(job, "ingest", ["a"]), folder_with(job, "clean", ["b", "c"])
    run = JobRun(job, store_for(job.output).local(job.output))
    run.event(State.RUNNING, "ingest put 1 records into quarantine", quarantine=[ingest])
    run.event(State.RUNNING, "clean put 2 records into quarantine", quarantine=[ingest, clean])
    run.event(State.FAILED, "too many", error="BadRecords")
    projection.project(job, "r1")
    assert quarantine.project(job)
    cursor = database.cursor(row_factory=psycopg.rows.dict_row)
    (met,) = cursor.execute(query("quarantine_jobs").encode()).fetchall()
    assert (met["id"], met["state"], met["reason"], met["records"]) == (job.id, "failed", "too many", 3)
    arguments = {"job": job.id, "source": None, "kind": None, "most": 10}
    found = cursor.execute(query("quarantine_samples").encode(), arguments).fetchall()
    assert sorted(row["sample"] for row in found) == ["a", "b", "c"]
    found = cursor.execute(query("quarantine_samples").encode(), {**arguments, "kind": "reason 1"}).fetchall()
    assert [row["sample"] for row in found] == ["c"]


def test_a_later_try_s_word_stands(database: psycopg.Connection[Any], job: Job) -> None:
    first, second = folder_with(job, "ingest", ["a"]), folder_with(job, "clean", ["b"])
    for attempt, folder in ((1, first), (2, second)):
        run = JobRun(job.model_copy(update={"attempt": attempt}), store_for(job.output).local(job.output))
        run.event(State.RUNNING, "bad", quarantine=[folder])
        projection.project(job, "r1")
        assert quarantine.project(job)
    assert rows(database, "SELECT dataset FROM job_quarantines") == [(second,)]


def test_a_database_that_is_away_or_a_file_that_is_broken_costs_no_task(
    database: psycopg.Connection[Any], job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = finished(job, ["a"])
    path = store_for(dataset).local(join(dataset, quarantine.FILE))
    whole = path.read_bytes()
    path.write_bytes(b"no parquet")
    assert quarantine.project(job) is False
    path.unlink()
    assert quarantine.project(job) is False
    path.write_bytes(whole)
    with monkeypatch.context() as away:
        away.setenv("REFIT_DATABASE_URL", "postgresql://refit@127.0.0.1:9/refit")
        assert quarantine.project(job) is False
    assert quarantine.project(job) is True
    assert rows(database, "SELECT count(*) FROM bad_records") == [(1,)]


def test_a_job_that_postgres_does_not_know_yet_waits_for_the_next_copy(
    database: psycopg.Connection[Any], job: Job
) -> None:
    finished(job, ["a"])
    database.execute("TRUNCATE jobs CASCADE")
    assert quarantine.project(job) is False
    assert rows(database, "SELECT count(*) FROM bad_records") == [(0,)]
    projection.project(job, "r1")
    assert quarantine.project(job) is True
