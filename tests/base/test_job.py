"""The contract: in by one document, out by one document, success only with a manifest."""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path

import boto3
import pytest

from refit import cli
from refit.errors import BY_EXIT_CODE, BadRecords, Infrastructure, Occupied, Preempted, from_exit_code
from refit.job import UNTOLD, Job, JobRun, last_word, read_events, run
from refit.manifest import Manifest
from refit.pipeline import load
from refit.states import NEXT, State, step
from refit.store import join, store_for

TINY = Path(__file__).resolve().parents[2] / "dags" / "pipelines" / "tiny.yaml"


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job.build("train", load(TINY), store=f"file://{tmp_path}", output=f"file://{tmp_path}/out")


def events(job: Job) -> list[dict[str, object]]:
    return read_events(Path(job.output.removeprefix("file://"), "events.jsonl").read_text())


def done(running: JobRun) -> Manifest:
    running.progress("work", 1, 2, loss=0.5)
    return Manifest(kind="job", fingerprint="f", facts={"answer": 42})


def test_a_job_ends_with_its_manifest_and_is_answered_from_it(job: Job) -> None:
    assert run(job, done).facts == {"answer": 42}
    assert [event["state"] for event in events(job)] == ["running", "succeeded"]

    def never(running: JobRun) -> Manifest:
        raise AssertionError("ran twice")

    assert run(job, never).facts == {"answer": 42}
    status = json.loads(Path(job.output.removeprefix("file://"), "status.json").read_text())
    assert (status["phase"], status["done"], status["total"], status["loss"]) == ("work", 1, 2, 0.5)


@pytest.mark.parametrize(
    ("error", "code", "state"),
    [(BadRecords("x"), 10, "failed"), (Preempted("x"), 20, "suspended"), (RuntimeError("x"), None, "failed")],
)
def test_an_error_leaves_an_event_and_no_manifest(job: Job, error: Exception, code: int | None, state: str) -> None:
    def fails(running: JobRun) -> Manifest:
        raise error

    with pytest.raises(type(error)):
        run(job, fails)
    assert events(job)[-1]["state"] == state
    assert events(job)[-1]["exit_code"] == (code or 1)
    assert not Path(job.output.removeprefix("file://"), "manifest.json").exists()


def test_a_second_attempt_goes_on_counting(job: Job) -> None:
    with pytest.raises(RuntimeError):
        run(job, lambda running: (_ for _ in ()).throw(RuntimeError("x")))
    run(job.model_copy(update={"attempt": 2}), done)
    assert [event["sequence"] for event in events(job)] == [1, 2, 3, 4, 5]
    assert [event["attempt"] for event in events(job)] == [1, 1, 2, 2, 2]
    assert [event["state"] for event in events(job)] == ["running", "failed", "retrying", "running", "succeeded"]


def killed_at_work(job: Job) -> None:
    """A process that is killed while it does the job."""
    if (child := os.fork()) == 0:
        try:
            run(job, lambda running: os.kill(os.getpid(), signal.SIGKILL))  # type: ignore[arg-type, return-value]
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize("attempt", [1, 2])
def test_an_attempt_after_one_that_was_killed_begins_with_retrying(job: Job, attempt: int) -> None:
    """It went from running to running. Who starts a job by hand counts no attempts."""
    killed_at_work(job)
    assert [event["state"] for event in events(job)] == ["running"]
    run(job.model_copy(update={"attempt": attempt}), done)
    assert [event["state"] for event in events(job)] == ["running", "retrying", "running", "succeeded"]
    assert "ended without a word" in str(events(job)[1]["reason"])
    assert events(job)[1]["attempt"] == attempt


def test_a_process_that_finds_the_job_taken_leaves_its_state_and_its_numbers_alone(job: Job) -> None:
    """Both write to one file: a number that is used twice is an event that the projection never shows."""

    def taken(running: JobRun) -> Manifest:
        raise Occupied("another trainer writes there")

    def first(running: JobRun) -> Manifest:
        with pytest.raises(Occupied):
            run(job, taken)
        running.event(State.RETRYING, "a rank was lost")
        running.event(State.RUNNING, "launch 2")
        return done(running)

    run(job, first)
    assert [event["sequence"] for event in events(job)] == [1, 2, 3, 4, 5]
    assert [event["state"] for event in events(job)] == ["running", "running", "retrying", "running", "succeeded"]


def ends(how: str) -> Manifest:
    """The end of a process that does a job."""
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "suspended":
        raise Preempted("told to stop")
    return Manifest(kind="job", fingerprint="f", facts={"answer": 7})


@pytest.mark.parametrize(
    ("how", "after"),
    [
        ("suspended", ["running", "running", "suspended", "retrying", "running", "running", "succeeded"]),
        ("killed", ["running", "running", "retrying", "running", "running", "succeeded"]),
        ("succeeded", ["running", "running", "succeeded"]),
    ],
)
def test_who_waits_for_a_process_of_the_job_begins_after_its_last_word(
    job: Job, tmp_path: Path, how: str, after: list[str]
) -> None:
    """A trainer that waited for one that was told to stop fell over "a suspended job cannot become running"."""

    def first(running: JobRun) -> Manifest:
        (tmp_path / "here").touch()
        while not (tmp_path / "go").exists():
            time.sleep(0.01)
        return ends(how)

    def second(running: JobRun) -> Manifest:
        (tmp_path / "go").touch()
        running.follow()
        running.event(State.RUNNING, "a remark")
        return done(running)

    if (child := os.fork()) == 0:
        try:
            run(job, first)
        finally:
            os._exit(0)
    while not (tmp_path / "here").exists():
        time.sleep(0.01)
    answer = run(job.model_copy(update={"attempt": 2}), second)
    os.waitpid(child, 0)
    assert answer.facts == {"answer": 7 if how == "succeeded" else 42}
    assert [event["state"] for event in events(job)] == after


def test_a_job_whose_manifest_was_taken_away_is_done_anew_and_says_so(job: Job) -> None:
    run(job, done)
    Path(job.output.removeprefix("file://"), "manifest.json").unlink()
    run(job, done)
    assert [event["state"] for event in events(job)] == ["running", "succeeded", "retrying", "running", "succeeded"]


def killed_after_its_manifest(job: Job) -> None:
    """A process that is killed between the job's manifest and the word of its success."""
    if (child := os.fork()) == 0:
        commit = JobRun.commit

        def last_act(running: JobRun, manifest: Manifest) -> Manifest:
            commit(running, manifest)
            os.kill(os.getpid(), signal.SIGKILL)
            return manifest

        JobRun.commit = last_act  # type: ignore[method-assign]
        try:
            run(job, done)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


def test_a_success_that_a_kill_kept_untold_is_told_by_who_finds_it(job: Job) -> None:
    """It stood at "running" for ever: whoever came found the answer, and had nothing to say."""
    killed_after_its_manifest(job)
    assert [event["state"] for event in events(job)] == ["running"]
    for attempt in (2, 3):
        assert run(job.model_copy(update={"attempt": attempt}), done).facts == {"answer": 42}
    assert [event["state"] for event in events(job)] == ["running", "succeeded"]
    assert "manifest is there" in str(events(job)[-1]["reason"])


def test_a_manifest_that_came_with_a_failure_is_a_success_in_the_end(job: Job) -> None:
    """A store may do what it was asked, and fail to say so."""

    def doubted(running: JobRun) -> Manifest:
        running.commit(done(running))
        raise Infrastructure("the store did not answer")

    with pytest.raises(Infrastructure):
        run(job, doubted)
    run(job, done)
    assert [event["state"] for event in events(job)] == ["running", "failed", "retrying", "running", "succeeded"]


def test_who_wrote_the_manifest_may_say_so_after_who_found_it(job: Job) -> None:
    def overtaken(running: JobRun) -> Manifest:
        manifest = running.commit(done(running))
        run(job, done)  # another process, at this moment
        return manifest

    run(job, overtaken)
    assert [event["state"] for event in events(job)] == ["running", "succeeded"]


def test_a_job_stands_by_its_manifest_before_its_events() -> None:
    told = [{"sequence": 1, "state": "running", "reason": "attempt 1", "attempt": 1}]
    assert last_word(told, committed=False) == told[0]
    assert last_word(told, committed=True) == {**told[0], "state": "succeeded", "reason": UNTOLD}
    assert last_word([], committed=False) == {}


def test_an_event_that_cannot_follow_is_refused_and_not_recorded(job: Job) -> None:
    def confused(running: JobRun) -> Manifest:
        with pytest.raises(ValueError, match="a running job cannot become pending"):
            running.event(State.PENDING, "x")
        return done(running)

    run(job, confused)
    assert [event["state"] for event in events(job)] == ["running", "succeeded"]


def test_on_s3_another_machine_goes_on_counting_events(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job.build("train", load(TINY), store=s3, output=join(s3, tmp_path.name))
    for machine in ("first", "second"):
        monkeypatch.setenv("REFIT_CACHE", str(tmp_path / machine))
        if machine == "first":
            with pytest.raises(RuntimeError):
                run(job, lambda running: (_ for _ in ()).throw(RuntimeError("x")))
        else:
            run(job, done)
    recorded = read_events(store_for(s3).read(join(job.output, "events.jsonl")).decode())
    assert [event["sequence"] for event in recorded] == [1, 2, 3, 4, 5]


def test_on_s3_a_job_that_was_removed_from_the_store_begins_anew(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a former run left on this machine's disk is not taken for its own."""
    monkeypatch.setenv("REFIT_CACHE", str(tmp_path))
    job = Job.build("train", load(TINY), store=s3, output=join(s3, tmp_path.name))
    seen = []

    def leaves_a_file(running: JobRun) -> Manifest:
        seen.append((running.folder / "asked.jsonl").exists())
        (running.folder / "asked.jsonl").write_text("x")
        return done(running)

    for _ in range(2):
        run(job, leaves_a_file)
        bucket, _, key = job.output.removeprefix("s3://").partition("/")
        for name in store_for(s3).children(job.output):
            boto3.client("s3").delete_object(Bucket=bucket, Key=f"{key}/{name}")
    assert seen == [False, False]


def test_the_command_line_and_the_document_run_the_same_code(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REFIT_JOB", job.save())
    assert cli.main(argparse.ArgumentParser("trainer"), {"train": done}, []) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["answer"] == 42


def test_a_refusal_is_a_sentence_and_a_code(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REFIT_JOB", job.save())
    assert cli.main(argparse.ArgumentParser("corpus"), {"prepare": done}, []) == 10
    shown = capsys.readouterr()
    assert "has no 'train'; it does prepare" in shown.err
    assert json.loads(shown.out.splitlines()[-1])["error"] == "BadSpec"


def test_a_document_that_is_not_a_job_names_its_fault(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text('{"id": "x", "knd": "train"}')
    with pytest.raises(Exception, match=r"knd is not a setting"):
        Job.load(f"file://{tmp_path}/job.json")


def test_exit_codes_name_errors_both_ways() -> None:
    for code, error in BY_EXIT_CODE.items():
        assert type(from_exit_code(code, "x")) is error
    assert isinstance(from_exit_code(-9, "killed"), Infrastructure)
    assert not BY_EXIT_CODE[10].retry
    assert BY_EXIT_CODE[20].retry


def test_states_change_only_as_drawn() -> None:
    assert step(State.RUNNING, State.SUCCEEDED) is State.SUCCEEDED
    for state in NEXT:
        with pytest.raises(ValueError, match="cannot become"):
            step(State.SUCCEEDED, state)
