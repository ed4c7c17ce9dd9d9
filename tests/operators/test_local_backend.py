"""The local backend, with real processes: one at a time, found again, ended whole."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from operators.backends import Phase, keeper
from operators.backends.local import LocalBackend, environment, mark
from refit import proc
from refit.errors import BadRecords, Infrastructure, NodeLost
from refit.job import Job
from refit.pipeline import validate
from refit.spec import Pipeline
from refit.store import store_for

MakeJob = Callable[..., Job]


def starts(job: Job) -> list[str]:
    """The pids of every time that the program itself began."""
    try:
        return store_for(job.output).read(job.output + "/starts").decode().split()
    except FileNotFoundError:
        return []


def ended(backend: LocalBackend, job: Job) -> bool:
    return backend.state(job.output).phase is Phase.ENDED


def test_a_job_runs_to_its_manifest_and_its_exit_code_is_kept(backend: LocalBackend, make_job: MakeJob, until) -> None:
    job = make_job(("say", "hello"), facts={"loss": 1.5})
    assert backend.state(job.output).phase is Phase.ABSENT
    assert backend.submit(job) is True
    until(lambda: ended(backend, job))
    assert backend.state(job.output).exit_code == 0
    assert store_for(job.output).manifest(job.output).facts == {"loss": 1.5}
    lines, cursor = backend.logs(job.output)
    assert "hello" in lines
    assert backend.logs(job.output, cursor) == ([], cursor)


def test_a_second_submit_adopts_the_living_one(backend: LocalBackend, make_job: MakeJob, until, tmp_path: Path) -> None:
    job = make_job(("wait_for", str(tmp_path / "go")))
    assert backend.submit(job) is True
    assert LocalBackend().submit(job) is False
    (tmp_path / "go").touch()
    until(lambda: ended(backend, job))
    assert len(starts(job)) == 1


def test_many_submits_at_once_start_exactly_one_process(
    backend: LocalBackend, make_job: MakeJob, until, tmp_path: Path
) -> None:
    job = make_job(("wait_for", str(tmp_path / "go")))
    context = multiprocessing.get_context("fork")
    gate, answers = context.Event(), context.Queue()

    def submit() -> None:
        gate.wait()
        answers.put(LocalBackend().submit(job))

    callers = [context.Process(target=submit) for _ in range(4)]
    for caller in callers:
        caller.start()
    gate.set()
    said = [answers.get(timeout=60) for _ in callers]
    for caller in callers:
        caller.join()
    until(lambda: starts(job))
    assert sorted(said) == [False, False, False, True]
    keepers = [
        i for i in proc.find_tagged(mark(job.output)) if b"keeper" in Path(f"/proc/{i.pid}/cmdline").read_bytes()
    ]
    assert len(keepers) == 1
    (tmp_path / "go").touch()
    until(lambda: ended(backend, job))
    assert len(starts(job)) == 1


def test_a_job_outlives_the_sigkill_of_its_submitter_and_is_adopted(
    backend: LocalBackend, make_job: MakeJob, until, tmp_path: Path
) -> None:
    """A worker that dies between the start and the deferral must leave something that the retry finds."""
    job = make_job(("wait_for", str(tmp_path / "go")))
    uri = job.save()
    submitter = subprocess.Popen(
        [sys.executable, "-c",
         "import sys, time; from operators.backends.local import LocalBackend; from refit.job import Job\n"
         "LocalBackend().submit(Job.load(sys.argv[1])); print('started', flush=True); time.sleep(600)", uri],
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert submitter.stdout.readline() == b"started\n"
    submitter.kill()
    submitter.wait()
    assert backend.state(job.output).phase is Phase.RUNNING
    assert backend.submit(job) is False
    (tmp_path / "go").touch()
    until(lambda: ended(backend, job))
    assert backend.state(job.output).exit_code == 0
    assert len(starts(job)) == 1


def test_stop_ends_the_whole_tree_also_children_in_sessions_of_their_own(
    backend: LocalBackend, make_job: MakeJob, until, tmp_path: Path
) -> None:
    job = make_job(("leave", "child"), ("wait_for", str(tmp_path / "never")))
    backend.submit(job)
    child = tmp_path / "store/training/line/one/child"
    until(lambda: child.exists() and child.read_text())
    identity = proc.Identity.of(int(child.read_text()))
    assert backend.stop(job.output, grace=2) is True
    assert not proc.alive(identity)
    assert proc.find_tagged(mark(job.output)) == []
    assert backend.stop(job.output) is False


def test_what_a_program_leaves_behind_ends_with_it(backend: LocalBackend, make_job: MakeJob, until) -> None:
    job = make_job(("leave", "child"))
    backend.submit(job)
    until(lambda: ended(backend, job))
    assert proc.find_tagged(mark(job.output)) == []


def test_sigkill_of_the_keeper_takes_the_program_along_and_counts_as_a_lost_node(
    backend: LocalBackend, make_job: MakeJob, until, tmp_path: Path
) -> None:
    job = make_job(("wait_for", str(tmp_path / "go")))
    backend.submit(job)
    until(lambda: starts(job))
    os.kill(backend.identity(job.output).pid, signal.SIGKILL)
    until(lambda: ended(backend, job))
    assert isinstance(backend.state(job.output).fault, NodeLost)
    until(lambda: proc.find_tagged(mark(job.output)) == [])
    assert backend.submit(job) is True
    (tmp_path / "go").touch()
    until(lambda: backend.state(job.output).exit_code == 0)
    assert len(starts(job)) == 2


def test_sigkill_of_the_program_is_known_by_its_signal(
    backend: LocalBackend, make_job: MakeJob, until, tmp_path: Path
) -> None:
    job = make_job(("wait_for", str(tmp_path / "go")))
    backend.submit(job)
    os.kill(int(until(lambda: starts(job))[0]), signal.SIGKILL)
    until(lambda: ended(backend, job))
    standing = backend.state(job.output)
    assert standing.exit_code == -9
    assert isinstance(standing.fault, Infrastructure)
    assert "signal 9" in standing.why


def test_a_typed_failure_keeps_its_code_and_its_words(backend: LocalBackend, make_job: MakeJob, until) -> None:
    job = make_job(("raise", "BadRecords"))
    backend.submit(job)
    until(lambda: ended(backend, job))
    standing = backend.state(job.output)
    assert standing.exit_code == BadRecords.exit_code
    assert standing.why == "as told: BadRecords"
    assert not standing.fault.retry


def test_an_exit_that_nobody_chose_is_infrastructure_and_shows_the_last_lines(
    backend: LocalBackend, make_job: MakeJob, until
) -> None:
    job = make_job(("say", "the disk made a noise"), ("exit", 3))
    backend.submit(job)
    until(lambda: ended(backend, job))
    standing = backend.state(job.output)
    assert isinstance(standing.fault, Infrastructure)
    assert "the disk made a noise" in standing.why


def test_a_job_sees_a_whitelist_and_no_secret(
    backend: LocalBackend, make_job: MakeJob, until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGPASSFILE", "/secrets/pgpass")
    monkeypatch.setenv("REFIT_TOKEN_FILE", "/secrets/token")
    monkeypatch.setenv("AIRFLOW__DATABASE__SQL_ALCHEMY_CONN", "postgresql://u:p@h/d")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    job = make_job(("environment", None))
    backend.submit(job)
    until(lambda: ended(backend, job))
    seen = set(store_for(job.output).manifest(job.output).facts["environment"])
    assert {"REFIT_JOB", "REFIT_STORE", proc.TAG} <= seen
    assert not {name for name in seen if name.startswith(("PG", "AIRFLOW", "AWS", "REFIT_TOKEN", "REFIT_DATABASE"))}


def test_the_store_s_own_access_is_passed_on_where_the_store_is_s3(make_job: MakeJob) -> None:
    job = make_job().model_copy(update={"store": "s3://bucket"})
    assert environment(job, {"AWS_SECRET_ACCESS_KEY": "secret"})["AWS_SECRET_ACCESS_KEY"] == "secret"


@pytest.mark.parametrize("field", ["base", "warm_start", "checkpoint.copy_to"])
def test_so_it_is_where_a_training_begins_or_is_kept_on_s3(make_job: MakeJob, field: str) -> None:
    job = make_job()
    group, _, name = field.rpartition(".")
    place = getattr(job.spec.train, group) if group else job.spec.train
    changed = place.model_copy(update={name: "s3://elsewhere/x"})
    train = job.spec.train.model_copy(update={group: changed}) if group else changed
    job = job.model_copy(update={"spec": job.spec.model_copy(update={"train": train})})
    assert "AWS_PROFILE" not in environment(make_job(), {"AWS_PROFILE": "p"})
    assert environment(job, {"AWS_PROFILE": "p"})["AWS_PROFILE"] == "p"


def test_a_log_is_read_in_whole_lines_whatever_the_moment(backend: LocalBackend, make_job: MakeJob) -> None:
    job = make_job()
    path = backend.folder(job.output) / keeper.OUTPUT
    path.parent.mkdir(parents=True)
    path.write_text("one\ntw")
    lines, cursor = backend.logs(job.output)
    assert lines == ["one"]
    path.write_text("one\ntwo\n")
    assert backend.logs(job.output, cursor) == (["two"], "8")


def test_a_torn_record_counts_as_none(backend: LocalBackend, make_job: MakeJob) -> None:
    job = make_job()
    folder = backend.folder(job.output)
    folder.mkdir(parents=True)
    (folder / keeper.PROCESS).write_text(json.dumps({"identity": 1})[:-3])
    assert backend.state(job.output).phase is Phase.ABSENT


def test_a_data_job_is_handed_the_connections_of_its_own_sources_and_no_other_job_is(
    make_job: Callable[..., Job], spec: Pipeline
) -> None:
    document = spec.model_dump(mode="json")
    document["data"]["sources"] = [
        {"name": "a", "uri": "sql://crm", "query": "SELECT 1"}, {"name": "b", "uri": "s3://in/b.jsonl"},
    ]  # fmt: skip
    given = {"REFIT_CONNECTION_CRM": "postgresql://u:p@h/d", "REFIT_CONNECTION_PAYROLL": "x", "AWS_PROFILE": "reader"}
    job = make_job().model_copy(update={"kind": "prepare", "spec": validate(document, "x")})
    handed = environment(job, given)
    assert handed.keys() & given.keys() == {"REFIT_CONNECTION_CRM", "AWS_PROFILE"}
    assert "REFIT_CONNECTION_CRM" not in environment(job.model_copy(update={"kind": "train"}), given)
