"""The training stage's operator: what is looked at anew, and what is answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowSkipException, TaskDeferred

from operators import projection, run
from operators.backends.local import LocalBackend
from operators.early import EarlyOperator
from operators.job import JobOperator
from operators.training import DeepSpeedOperator, training_folder
from refit import runs
from refit.errors import BadInput, GateRefused, Infrastructure
from refit.job import read_events
from refit.manifest import File, Manifest
from refit.spec import Pipeline
from refit.store import join, store_for

Fire = Callable[..., dict[str, Any]]


@pytest.fixture
def stage(home: Any, spec: Pipeline, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """An operator of a kind, on a committed dataset and base model."""
    monkeypatch.setenv("REFIT_CACHE", str(tmp_path / "cache"))
    dataset = join((tmp_path / "store").as_uri(), "datasets/line/pack/d")
    for uri, kind in ((dataset, "dataset"), ("cache://models/base", "model")):
        text = Manifest(kind=kind, fingerprint="f" * 32).model_dump_json()
        store_for(uri).write(join(uri, "manifest.json"), text.encode())
    uri = run.write(spec, join(run.folder("line", "manual__1"), runs.SPEC))

    def make(kind: Any, *act: tuple[str, Any], **more: Any) -> JobOperator:
        options = {"act": list(act), **more.pop("options", {})}
        if kind == "early":
            return EarlyOperator(task_id=kind, spec=uri, inputs={"dataset": dataset}, options=options, **more)
        first = more.pop("first_champion", False)
        inputs = {"dataset": dataset, **more}
        return DeepSpeedOperator(
            task_id=kind, kind=kind, spec=uri, inputs=inputs, options=options, first_champion=first
        )

    return make


def begun(operator: JobOperator, context: dict[str, Any]) -> TaskDeferred:
    with pytest.raises(TaskDeferred) as caught:
        operator.execute(context)
    return caught.value


def finished(operator: JobOperator, context: dict[str, Any], fire: Fire) -> str:
    """The manifest of a job that was really done."""
    return operator.conclude(context, fire(begun(operator, context).trigger))


@pytest.mark.parametrize("kind", ["preflight", "trial"])
def test_a_cleared_task_looks_at_the_machine_again_and_its_events_go_on_counting(
    stage: Callable[..., Any], context: dict[str, Any], fire: Fire, backend: LocalBackend, until: Any, kind: str
) -> None:
    first = finished(stage(kind), context, fire)
    until(lambda: not backend.adopt(first.rpartition("/")[0]))
    assert finished(stage(kind), context, fire) == first
    folder = first.rpartition("/")[0]
    events = read_events(store_for(folder).read(join(folder, "events.jsonl")).decode())
    assert [event["sequence"] for event in events] == list(range(1, len(events) + 1))
    assert [event["state"] for event in events].count("succeeded") == 2


def test_a_training_is_never_waited_for_in_place(
    stage: Callable[..., Any], context: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler that dies takes the worker along, and it is minutes until somebody misses the task."""
    monkeypatch.setattr("operators.job.QUICK_SECONDS", {"local": 60.0})
    begun(stage("train"), context)
    assert stage("plan").execute(context)


def test_another_run_has_a_trial_of_its_own_and_shares_the_plan(
    stage: Callable[..., Any], context: dict[str, Any], fire: Fire
) -> None:
    plan, trial = (finished(stage(kind), context, fire) for kind in ("plan", "trial"))
    other = {**context, "run_id": "manual__2"}
    assert stage("plan").execute(other) == plan, "answered"
    assert finished(stage("trial"), other, fire) != trial


@pytest.mark.parametrize("kind", ["plan", "smoke"])
def test_a_plan_or_smoke_run_of_another_layout_is_no_answer(
    stage: Callable[..., Any], context: dict[str, Any], spec: Pipeline, kind: str
) -> None:
    """Planned for 8 ranks and trained on 2: preflight would look for the memory of the 8."""

    def folder(**changes: Any) -> str:
        operator = stage(kind)
        train = spec.train.model_copy(update=changes)
        return str(operator.output_of(spec.model_copy(update={"train": train}), context))

    stage(kind).build_job(context)
    others = [{"ranks": 8}, {"engine": "deepspeed"}, {"offload": "optimizer"}, {"tensor_parallel": 2}, {"nodes": 2}]
    assert len({folder(), *(folder(**changes) for changes in others)}) == 1 + len(others)
    assert folder(queue="other", max_restarts=9) == folder()


def test_a_trial_is_told_where_the_plan_lies(stage: Callable[..., Any], context: dict[str, Any], fire: Fire) -> None:
    plan = finished(stage("plan"), context, fire)
    job = stage("trial", plan=plan).build_job(context)
    assert job.inputs["plan"] == plan.removesuffix("/manifest.json")


def look(verdict: str) -> dict[str, Any]:
    """The facts of an early look."""
    numbers = {"loss": 3.0, "base_loss": 2.0, "difference": 1.0, "low": 0.8, "high": 1.2, "margin": 0.0}
    return {"facts": {"verdict": verdict, "step": 50, "documents": 300, **numbers}}


def test_a_training_that_gets_worse_is_stopped_and_refused_with_its_numbers_and_not_tried_again(
    stage: Callable[..., Any], context: dict[str, Any], fire: Fire, backend: LocalBackend, tmp_path: Any
) -> None:
    """Reported by many: a run that went wrong in its first hour used up the cluster for days."""
    training = stage("train", ("wait_for", str(tmp_path / "never")))
    wait = begun(training, context)
    checkpoint = join(str(training.folder), "checkpoints/step-50")
    finished(stage("early", checkpoint=checkpoint, options=look("worse")), context, fire)
    assert not backend.adopt(str(training.folder)), "its job has ended"
    with pytest.raises(GateRefused, match=r"stopped early: at step 50 the loss .* is 3, the base model's 2.*\+1"):
        stage("train").conclude(context, fire(wait.trigger))
    with pytest.raises(GateRefused, match=r"train\.early\.margin"):
        stage("train").execute(context)
    assert begun(stage("train", first_champion=True), context), "what there is to beat is another training"
    other = {**context, "run_id": "manual__2"}
    assert begun(stage("train"), other), "another run, with other settings, may go on from its checkpoints"


def test_a_training_that_does_well_goes_on(
    stage: Callable[..., Any], context: dict[str, Any], fire: Fire, tmp_path: Any
) -> None:
    training = stage("train", ("wait_for", str(tmp_path / "go")))
    wait = begun(training, context)
    checkpoint = join(str(training.folder), "checkpoints/step-50")
    finished(stage("early", checkpoint=checkpoint, options=look("fine")), context, fire)
    (tmp_path / "go").touch()
    assert stage("train").conclude(context, fire(wait.trigger)).endswith("manifest.json")


def test_a_look_that_fails_is_tried_again_and_then_skipped_with_an_alert_so_that_a_good_run_stays_green(
    stage: Callable[..., Any], context: dict[str, Any], fire: Fire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a leaf of the run; what the training and the gate say is the run's outcome."""
    alerts: list[str] = []
    monkeypatch.setattr(projection, "alert", lambda _level, _source, why, **_more: alerts.append(why))

    def look_at(step: int, error: str) -> None:
        checkpoint = f"file:///o/checkpoints/step-{step}"
        finished(stage("early", ("raise", error), checkpoint=checkpoint), context, fire)

    with pytest.raises(Infrastructure):
        look_at(1, "NodeLost")
    assert alerts == []
    context["ti"].try_number = context["ti"].max_tries + 1
    for step, error in enumerate(("NodeLost", "PreflightRefused", "Diverged"), start=2):
        with pytest.raises(AirflowSkipException, match=f"no early look: .*as told: {error}"):
            look_at(step, error)
    assert len(alerts) == 3


def test_where_there_is_nothing_to_look_at_any_more_the_look_is_skipped(
    stage: Callable[..., Any], context: dict[str, Any], fire: Fire
) -> None:
    gone = stage("early", ("raise", "BadInput"), checkpoint="file:///o/checkpoints/step-50")
    with pytest.raises(AirflowSkipException, match="nothing to look at"):
        finished(gone, context, fire)
    with pytest.raises(AirflowSkipException, match="the exam judges it"):
        stage("early", checkpoint="file:///o").execute(context)


def test_a_training_that_begins_warm_has_its_own_folder_by_the_checkpoints_content(
    stage: Callable[..., Any], spec: Pipeline, tmp_path: Any
) -> None:
    stage("train")  # commits dataset and base model
    dataset = join((tmp_path / "store").as_uri(), "datasets/line/pack/d")
    folders = {training_folder(spec, dataset)}
    for name, digest in (("a", "1"), ("b", "2"), ("again", "2")):
        uri = join((tmp_path / name).as_uri(), "checkpoints/step-8")
        weights = File(path="state-rank-0.safetensors", size=1, sha256=digest)
        made = Manifest(kind="checkpoint", fingerprint=name, files=(weights,))
        store_for(uri).write(join(uri, "manifest.json"), made.model_dump_json().encode())
        warm = spec.model_copy(update={"train": spec.train.model_copy(update={"warm_start": uri})})
        folders.add(training_folder(warm, dataset))
    assert len(folders) == 3
    store_for(uri).remove(uri)
    with pytest.raises(BadInput, match=r"no manifest\.json there"):
        training_folder(warm, dataset)
