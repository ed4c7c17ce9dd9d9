"""The training stage's operator: what is looked at anew, and what is answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from airflow.sdk.exceptions import TaskDeferred

from operators import run
from operators.backends.local import LocalBackend
from operators.training import DeepSpeedOperator
from refit import runs
from refit.job import read_events
from refit.manifest import Manifest
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

    def make(kind: Any, **inputs: str) -> DeepSpeedOperator:
        return DeepSpeedOperator(task_id=kind, kind=kind, spec=uri, inputs={"dataset": dataset, **inputs})

    return make


def finished(operator: DeepSpeedOperator, context: dict[str, Any], fire: Fire) -> str:
    """The manifest of a job that was really done."""
    with pytest.raises(TaskDeferred) as caught:
        operator.execute(context)
    return operator.conclude(context, fire(caught.value.trigger))


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


def test_another_run_has_a_trial_of_its_own_and_shares_the_plan(
    stage: Callable[..., Any], context: dict[str, Any], fire: Fire
) -> None:
    plan, trial = (finished(stage(kind), context, fire) for kind in ("plan", "trial"))
    other = {**context, "run_id": "manual__2"}
    assert stage("plan").execute(other) == plan, "answered"
    assert finished(stage("trial"), other, fire) != trial


def test_a_trial_is_told_where_the_plan_lies(stage: Callable[..., Any], context: dict[str, Any], fire: Fire) -> None:
    plan = finished(stage("plan"), context, fire)
    job = stage("trial", plan=plan).build_job(context)
    assert job.inputs["plan"] == plan.removesuffix("/manifest.json")
