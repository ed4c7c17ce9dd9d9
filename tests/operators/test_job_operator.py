"""JobOperator over the local backend, with a real process under it: start, defer, conclude."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from airflow.sdk.exceptions import TaskDeferred

from operators import quarantine, run
from operators.backends.local import LocalBackend
from operators.data import CorpusOperator
from operators.errors import Cancelled, Hung, TimedOut
from operators.job import JobOperator
from refit import runs
from refit.errors import BadInput, Infrastructure, Preempted, RefitError
from refit.job import Job
from refit.manifest import Manifest
from refit.progress import status_of
from refit.spec import Pipeline
from refit.store import join, store_for

Fire = Callable[..., dict[str, Any]]


@pytest.fixture
def prepare(home: Path, spec: Pipeline) -> Callable[..., CorpusOperator]:
    """The data stage's operator for a run whose first task has written the spec."""
    uri = run.write(spec, join(run.folder("line", "manual__1"), runs.SPEC))

    def make(*act: tuple[str, Any], **arguments: Any) -> CorpusOperator:
        options = {"act": list(act), **arguments.pop("options", {})}
        return CorpusOperator(task_id="task", spec=uri, options=options, **arguments)

    return make


def deferred(operator: JobOperator, context: dict[str, Any]) -> TaskDeferred:
    with pytest.raises(TaskDeferred) as caught:
        operator.execute(context)
    return caught.value


def test_a_job_is_waited_for_deferred_and_returns_its_manifest(
    prepare: Callable[..., CorpusOperator], context: dict[str, Any], fire: Fire, backend: LocalBackend
) -> None:
    operator = prepare(options={"outputs": {"dataset": "file:///d"}})
    wait = deferred(operator, context)
    event = fire(wait.trigger)
    assert event["status"] == "done"
    uri = prepare().conclude(context, event)
    assert uri.endswith("/jobs/line/manual__1/prepare/manifest.json")
    assert run.output_named(uri, "dataset") == "file:///d"


def test_a_job_that_ends_within_seconds_is_waited_for_in_place(
    prepare: Callable[..., CorpusOperator], context: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("operators.job.QUICK_SECONDS", {"local": 60.0})
    uri = prepare(options={"outputs": {"dataset": "file:///d"}}).execute(context)
    assert run.output_named(uri, "dataset") == "file:///d"
    with pytest.raises(BadInput, match="as told: BadRecords"):
        prepare(("raise", "BadRecords")).execute({**context, "run_id": "manual__2"})


def test_a_job_that_does_not_is_left_to_a_trigger_that_goes_on_where_its_lines_were_read(
    prepare: Callable[..., CorpusOperator], context: dict[str, Any], fire: Fire, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("operators.job.QUICK_SECONDS", {"local": 3.0})
    act = [("say", "the first line"), ("wait_for", str(tmp_path / "go"))]
    wait = deferred(prepare(*act), context)
    assert int(wait.trigger.cursor or 0) > 0, "it has been shown already"
    (tmp_path / "go").touch()
    assert fire(wait.trigger)["status"] == "done"


def test_what_is_there_already_is_answered_without_a_process(
    prepare: Callable[..., CorpusOperator], context: dict[str, Any], backend: LocalBackend
) -> None:
    operator = prepare()
    job = operator.build_job(context)
    manifest = Manifest(kind="prepare", fingerprint="f" * 32)
    store_for(job.output).write(join(job.output, "manifest.json"), manifest.model_dump_json().encode())
    assert operator.execute(context) == join(job.output, "manifest.json")
    assert backend.identity(job.output) is None


def test_a_retry_adopts_the_process_that_the_first_try_started(
    prepare: Callable[..., CorpusOperator], context: dict[str, Any], fire: Fire, tmp_path: Path, until: Any
) -> None:
    act = ("wait_for", str(tmp_path / "go"))
    first = deferred(prepare(act), context)
    second = deferred(prepare(act), context)
    (tmp_path / "go").touch()
    assert fire(first.trigger)["status"] == fire(second.trigger)["status"] == "done"
    starts = store_for("file:///").read(join(run.folder("line", "manual__1"), "prepare", "starts"))
    assert len(starts.split()) == 1


@pytest.mark.parametrize(
    ("said", "error"), [("BadRecords", BadInput), ("Preempted", Preempted), ("StoreUnavailable", Infrastructure)]
)
def test_an_exit_code_becomes_the_matching_exception_with_the_job_s_own_words(
    prepare: Callable[..., CorpusOperator], context: dict[str, Any], fire: Fire, said: str, error: type[Exception]
) -> None:
    operator = prepare(("raise", said))
    event = fire(deferred(operator, context).trigger)
    with pytest.raises(error, match=f"as told: {said}"):
        operator.conclude(context, event)


@pytest.mark.parametrize(("said", "copied"), [("BadRecords", 1), ("StoreUnavailable", 0)])
def test_what_a_refused_data_job_put_into_quarantine_is_copied_and_the_task_still_fails(
    prepare: Callable[..., CorpusOperator], context: dict[str, Any], fire: Fire, monkeypatch: pytest.MonkeyPatch,
    said: str, copied: int,
) -> None:  # fmt: skip
    asked: list[Job] = []
    monkeypatch.setattr(quarantine, "project", asked.append)
    operator = prepare(("raise", said))
    event = fire(deferred(operator, context).trigger)
    with pytest.raises(RefitError, match=f"as told: {said}"):
        operator.conclude(context, event)
    assert [job.output for job in asked] == [operator.folder] * copied


@pytest.mark.integration
def test_the_history_of_a_job_that_ended_without_a_word_and_was_tried_again_is_whole(
    prepare: Callable[..., CorpusOperator], context: dict[str, Any], fire: Fire, database: psycopg.Connection[Any]
) -> None:
    """It began with running, and what Airflow knew of it was in no event."""
    event = fire(deferred(prepare(("exit", 30)), context).trigger)
    with pytest.raises(Infrastructure):
        prepare(("exit", 30)).conclude(context, event)
    context["ti"].try_number = 2
    second = prepare(options={"outputs": {"dataset": "file:///d"}})
    event = fire(deferred(second, context).trigger)
    second.conclude(context, event)
    told = database.execute(b"SELECT state, attempt FROM job_events ORDER BY sequence, mark").fetchall()
    assert told == [
        ("pending", 1), ("scheduled", 1), ("running", 1), ("retrying", 1),
        ("scheduled", 2), ("retrying", 2), ("running", 2), ("succeeded", 2),
    ]  # fmt: skip


def test_a_clean_exit_without_a_manifest_is_no_success(
    prepare: Callable[..., CorpusOperator], context: dict[str, Any], fire: Fire
) -> None:
    operator = prepare(("exit", 0))
    event = fire(deferred(operator, context).trigger)
    with pytest.raises(Infrastructure, match="without a manifest"):
        operator.conclude(context, event)


def test_a_silent_job_is_stopped_and_counts_as_hung(
    prepare: Callable[..., CorpusOperator], context: dict[str, Any], fire: Fire, backend: LocalBackend, tmp_path: Path
) -> None:
    operator = prepare(("wait_for", str(tmp_path / "never")), heartbeat_timeout=1.0)
    event = fire(deferred(operator, context).trigger)
    with pytest.raises(Hung, match="no sign of life"):
        operator.conclude(context, event)
    assert not backend.adopt(operator.folder)


def test_the_deadline_travels_in_the_trigger_and_stops_the_job(
    prepare: Callable[..., CorpusOperator], context: dict[str, Any], fire: Fire, backend: LocalBackend, tmp_path: Path
) -> None:
    operator = prepare(("wait_for", str(tmp_path / "never")))
    trigger = deferred(operator, context).trigger
    assert trigger.deadline == pytest.approx(time.time() + 24 * 3600 - 60, abs=60)
    trigger.deadline = time.time()
    event = fire(trigger)
    with pytest.raises(TimedOut):
        operator.conclude(context, event)
    assert not backend.adopt(operator.folder)


def test_a_person_who_ends_a_deferred_task_ends_its_job(
    prepare: Callable[..., CorpusOperator], context: dict[str, Any], backend: LocalBackend, tmp_path: Path
) -> None:
    operator = prepare(("wait_for", str(tmp_path / "never")))
    trigger = deferred(operator, context).trigger
    assert backend.adopt(operator.folder)
    asyncio.run(trigger.on_kill())
    assert not backend.adopt(operator.folder)


def test_a_worker_that_shuts_down_leaves_the_job_and_a_cancelled_task_does_not(
    prepare: Callable[..., CorpusOperator], context: dict[str, Any], backend: LocalBackend, tmp_path: Path
) -> None:
    operator = prepare(("wait_for", str(tmp_path / "never")))
    operator.on_kill()
    deferred(operator, context)
    assert backend.adopt(operator.folder)
    context["ti"].state = "failed"
    with pytest.raises(Cancelled):
        operator.execute(context)
    assert not backend.adopt(operator.folder)


def test_one_of_several_mapped_tasks_is_not_taken_for_cancelled(
    prepare: Callable[..., CorpusOperator], context: dict[str, Any], backend: LocalBackend, tmp_path: Path
) -> None:
    """Airflow names the states of mapped tasks by their number too."""
    context["ti"].map_index = 2
    operator = prepare(("wait_for", str(tmp_path / "never")))
    operator.on_kill()
    deferred(operator, context)
    assert backend.adopt(operator.folder)


def test_a_task_ended_by_hand_while_it_waits_in_place_ends_its_job_though_no_signal_has_come(
    prepare: Callable[..., CorpusOperator], context: dict[str, Any], backend: LocalBackend, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Airflow tells a worker with its next heartbeat, and refuses the deferral before: nobody would watch the job."""
    monkeypatch.setattr("operators.job.QUICK_SECONDS", {"local": 1.0})
    operator = prepare(("wait_for", str(tmp_path / "never")))
    context["ti"].state = "failed"
    with pytest.raises(Cancelled):
        operator.execute(context)
    assert not backend.adopt(operator.folder)


def test_the_job_s_lines_and_progress_reach_the_task_s_log(
    prepare: Callable[..., CorpusOperator],
    context: dict[str, Any],
    fire: Fire,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    until: Any,
) -> None:
    operator = prepare(("say", "epoch one"), ("progress", 40), ("wait_for", str(tmp_path / "go")))
    trigger = deferred(operator, context).trigger
    folder = run.folder("line", "manual__1")
    until(lambda: (status_of(join(folder, "prepare")) or {}).get("done") == 40)
    threading.Timer(2, (tmp_path / "go").touch).start()
    fire(trigger)
    said = capsys.readouterr().out
    assert "epoch one" in said
    assert "work 40 %" in said


def test_a_run_knows_which_job_each_of_its_tasks_does(
    prepare: Callable[..., CorpusOperator], context: dict[str, Any], backend: LocalBackend
) -> None:
    operator = prepare()
    deferred(operator, context)
    (record,) = runs.noted(run.folder("line", "manual__1"))
    assert (record["task"], record["kind"], record["output"]) == ("task", "prepare", operator.folder)
    assert Job.load(join(record["output"], "job.json")).id == record["job"]


def test_the_check_says_every_fault_at_once(home: Path, tmp_path: Path, spec: Pipeline) -> None:
    path = tmp_path / "line.yaml"
    document = spec.model_dump(mode="json")
    document["data"]["sources"].append({"name": "b", "uri": (tmp_path / "empty.jsonl").as_uri()})
    (tmp_path / "empty.jsonl").touch()
    path.write_text(json.dumps(document))
    with pytest.raises(BadInput) as caught:
        run.check(path, {}, "manual__1")
    text = str(caught.value)
    assert "data.sources[0].uri" in text
    assert "data.sources[1].uri" in text
    assert "0 rows" in text
    assert "train.base" in text


def test_the_form_and_the_overrides_are_laid_over_the_file(home: Path, tmp_path: Path, spec: Pipeline) -> None:
    path = tmp_path / "line.yaml"
    path.write_text(spec.model_dump_json())
    values = {"train.max_steps": 7, "overrides": {"train": {"seed": 3}}}
    resolved = run.resolve(path, values)
    assert (resolved.train.max_steps, resolved.train.seed, resolved.train.micro_batch) == (7, 3, 4)
    with pytest.raises(BadInput, match=r"train\.max_steps"):
        run.resolve(path, {"train.max_steps": 0})
