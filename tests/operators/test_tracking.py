"""A training's curves in a real MLflow, while it runs and however it ends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk.exceptions import TaskDeferred

from operators import run, tracking
from operators.backends.local import LocalBackend
from operators.job import JobOperator
from operators.promotion import RegistryOperator
from operators.training import DeepSpeedOperator
from operators.triggers import JobTrigger
from refit import runs
from refit.errors import Diverged, Preempted
from refit.job import JOB, Job
from refit.manifest import MANIFEST, Manifest
from refit.spec import Pipeline
from refit.store import join, store_for
from tests.mlflow_server import Server, running

pytestmark = pytest.mark.integration

Fire = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("tracking")) as server:
        yield server


@pytest.fixture
def mlflow(server: Server, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of the server that the environment names; steps go there at each look."""
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    monkeypatch.setattr(tracking, "LOG_SECONDS", 0.0)
    monkeypatch.setattr(tracking, "WAIT_SECONDS", 120.0)
    return MlflowClient(server.url, server.url)


@pytest.fixture
def training(
    home: Path, spec: Pipeline, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., DeepSpeedOperator]:
    """The training's operator; each test has a line of its own."""
    monkeypatch.setenv("REFIT_CACHE", str(tmp_path / "cache"))
    dataset = join((tmp_path / "store").as_uri(), "datasets/line/pack/d")
    for uri, kind in ((dataset, "dataset"), ("cache://models/base", "model")):
        text = Manifest(kind=kind, fingerprint="f" * 32).model_dump_json()
        store_for(uri).write(join(uri, MANIFEST), text.encode())
    line = request.node.name.removeprefix("test_")[:40].strip("_")
    uri = run.write(spec.model_copy(update={"name": line}), join(run.folder("line", "manual__1"), runs.SPEC))

    def make(*act: tuple[str, Any]) -> DeepSpeedOperator:
        return DeepSpeedOperator(task_id="task", spec=uri, inputs={"dataset": dataset}, options={"act": list(act)})

    return make


def begun(operator: JobOperator, context: dict[str, Any]) -> tuple[JobTrigger, Job]:
    """The trigger that waits for an operator's job, and that job."""
    with pytest.raises(TaskDeferred) as caught:
        operator.execute(context)
    trigger = caught.value.trigger
    assert isinstance(trigger, JobTrigger)
    trigger.poll_seconds = 0.05
    return trigger, Job.load(trigger.job)


def runs_of(mlflow: Any, job: Job) -> list[Any]:
    experiment = mlflow.get_experiment_by_name(job.pipeline)
    return list(mlflow.search_runs([experiment.experiment_id])) if experiment else []


def steps_of(mlflow: Any, job: Job) -> list[int]:
    """The steps of the loss's curve of the job's only run."""
    found = runs_of(mlflow, job)
    if not found:
        return []
    (only,) = found
    assert only.data.tags["refit.job"] == job.id
    return [point.step for point in mlflow.get_metric_history(only.info.run_id, "train/loss")]


def status_of(mlflow: Any, job: Job) -> str:
    (only,) = runs_of(mlflow, job)
    return str(only.info.status)


def look_until(trigger: JobTrigger, is_so: Callable[[], bool]) -> None:
    """Look as a triggerer does, which has its own loop to mind meanwhile."""
    while not is_so():
        assert trigger.ask() is None
        time.sleep(0.05)


def test_a_training_that_failed_has_its_curves(
    training: Callable[..., Any], context: dict[str, Any], fire: Fire, mlflow: Any
) -> None:
    operator = training(("steps", [0, 40]), ("raise", "Diverged"))
    trigger, job = begun(operator, context)
    event = fire(trigger)
    with pytest.raises(Diverged):
        operator.conclude(context, event)
    assert (status_of(mlflow, job), steps_of(mlflow, job)) == ("FAILED", list(range(1, 41)))


def test_steps_are_seen_while_it_runs_and_a_restart_doubles_none(
    training: Callable[..., Any], context: dict[str, Any], fire: Fire, mlflow: Any, tmp_path: Path
) -> None:
    """A triggerer dies; the training is preempted and takes steps back; another triggerer, and another try, go on."""
    operator = training(
        ("steps", [0, 20]), ("wait_for", str(tmp_path / "go")), ("steps", [15, 30]), ("raise", "Preempted")
    )
    trigger, job = begun(operator, context)
    look_until(trigger, lambda: steps_of(mlflow, job) == list(range(1, 21)))
    assert status_of(mlflow, job) == "RUNNING"
    (tmp_path / "go").touch()
    with pytest.raises(Preempted):
        operator.conclude(context, fire(trigger))  # made anew from what it serializes to
    assert (status_of(mlflow, job), steps_of(mlflow, job)) == ("KILLED", list(range(1, 31)))
    operator = training(("steps", [25, 50]), ("wait_for", str(tmp_path / "end")))
    trigger, again = begun(operator, context)
    assert again.id == job.id
    look_until(trigger, lambda: steps_of(mlflow, job) == list(range(1, 51)))
    assert status_of(mlflow, job) == "RUNNING"
    (tmp_path / "end").touch()
    operator.conclude(context, fire(trigger))
    assert (status_of(mlflow, job), steps_of(mlflow, job)) == ("FINISHED", list(range(1, 51)))
    tracking.catch_up(job)
    assert steps_of(mlflow, job) == list(range(1, 51))


def test_a_training_that_a_person_ends_is_killed(
    training: Callable[..., Any], context: dict[str, Any], mlflow: Any, tmp_path: Path
) -> None:
    trigger, job = begun(training(("steps", [0, 5]), ("wait_for", str(tmp_path / "never"))), context)
    look_until(trigger, lambda: steps_of(mlflow, job) == list(range(1, 6)))
    asyncio.run(trigger.on_kill())
    assert status_of(mlflow, job) == "KILLED"
    tracking.catch_up(job)
    assert status_of(mlflow, job) == "KILLED"


def test_a_training_goes_on_without_mlflow_and_its_curves_come_later(
    training: Callable[..., Any], context: dict[str, Any], fire: Fire, mlflow: Any, tmp_path: Path,
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """It is said once that it is away, however often it was tried; whoever registers the model makes up for it."""
    with monkeypatch.context() as away, caplog.at_level(logging.WARNING, "operators.tracking"):
        away.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
        away.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        operator = training(("steps", [0, 10]), ("wait_for", str(tmp_path / "go")))
        trigger, job = begun(operator, context)
        look_until(trigger, lambda: "logged later" in caplog.text)
        threads = set()
        look_until(trigger, lambda: threads.add(trigger._curves._thread) or len(threads) > 3)  # type: ignore[union-attr]
        assert caplog.text.count("logged later") == 1
        (tmp_path / "go").touch()
        uri = operator.conclude(context, fire(trigger))
    assert runs_of(mlflow, job) == []
    registers = RegistryOperator(task_id="register", release="r", made_by={"training": uri})
    found = registers._training_run()
    assert found == runs_of(mlflow, job)[0].info.run_id
    assert (status_of(mlflow, job), steps_of(mlflow, job)) == ("FINISHED", list(range(1, 11)))
    assert registers._training_run() == found
    assert steps_of(mlflow, job) == list(range(1, 11))


def test_many_points_go_in_several_calls(
    training: Callable[..., Any], context: dict[str, Any], fire: Fire, mlflow: Any
) -> None:
    operator = training(("steps", [0, 800]))
    trigger, job = begun(operator, context)
    uri = operator.conclude(context, fire(trigger))
    assert Job.load(join(uri.removesuffix(MANIFEST), JOB)) == job
    assert steps_of(mlflow, job) == list(range(1, 801))
    (only,) = runs_of(mlflow, job)
    losses = mlflow.get_metric_history(only.info.run_id, "train/loss")
    assert (losses[-1].value, losses[-1].timestamp - losses[0].timestamp) == (1 / 800, 799 * 500)
