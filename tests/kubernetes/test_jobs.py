"""Real jobs in real pods through JobOperator: data, a tiny training, and what a cluster does to them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk.exceptions import TaskDeferred

from operators import pods
from operators.backends import Phase
from operators.backends.kubernetes import KubernetesBackend
from operators.data import CorpusOperator
from operators.errors import restore
from operators.job import JobOperator
from operators.training import DeepSpeedOperator
from refit.errors import BadInput, NodeLost
from refit.spec import Pipeline
from refit.store import join, store_for

Wait = Callable[[JobOperator, dict[str, Any]], str]
SECONDS = 600.0


def deferred(operator: JobOperator, context: dict[str, Any]) -> Any:
    with pytest.raises(TaskDeferred) as caught:
        operator.execute(context)
    caught.value.trigger.poll_seconds = 0.5
    return caught.value.trigger


def event_of(trigger: Any) -> dict[str, Any]:
    async def first() -> dict[str, Any]:
        async for event in trigger.run():
            return dict(event.payload)
        raise AssertionError("the trigger ended without an event")

    return asyncio.run(asyncio.wait_for(first(), SECONDS))


def done(operator: JobOperator, context: dict[str, Any]) -> str:
    """Execute as Airflow would: start, wait deferred, conclude."""
    return operator.conclude(context, event_of(deferred(operator, context)))


@pytest.fixture
def prepared(spec_uri: str, context: dict[str, Any]) -> str:
    operator = CorpusOperator(task_id="corpus", spec=spec_uri)
    job = operator.build_job(context)
    if store_for(job.output).manifest(job.output) is None:
        return done(operator, context)
    return join(job.output, "manifest.json")


def test_a_data_job_runs_in_a_pod_to_its_manifest(prepared: str, cluster: KubernetesBackend) -> None:
    output = prepared.removesuffix("/manifest.json")
    manifest = store_for(output).manifest(output)
    assert store_for(manifest.outputs["dataset"]).manifest(manifest.outputs["dataset"]) is not None
    while cluster.state(output).alive:  # the manifest is there a moment before the process ends
        time.sleep(0.2)
    assert cluster.state(output).exit_code == 0
    lines, _ = cluster.logs(output)
    assert any("phase" in line for line in lines)


def test_a_tiny_training_runs_in_a_pod_to_a_model(
    prepared: str, spec_uri: str, context: dict[str, Any], spec: Pipeline
) -> None:
    operator = DeepSpeedOperator(task_id="train", spec=spec_uri, inputs={"dataset": prepared})
    uri = done(operator, context)
    manifest = store_for(uri).manifest(uri.removesuffix("/manifest.json"))
    assert manifest.facts["steps"] == spec.train.max_steps
    assert store_for(manifest.outputs["model"]).require(manifest.outputs["model"], "model").files


def test_two_tries_share_one_pod(
    spec_uri: str, context: dict[str, Any], cluster: KubernetesBackend, folder: Path
) -> None:
    operator = slow(spec_uri, "shared")
    first = deferred(operator, context)
    context["ti"].try_number = 2
    deferred(slow(spec_uri, "shared"), context)
    assert len(cluster._pods(operator.folder)) == 1
    assert event_of(first)["status"] in ("done", "failed")


def test_a_bad_spec_is_bad_input_with_the_program_s_own_words(
    spec_uri: str, context: dict[str, Any], cluster: KubernetesBackend
) -> None:
    operator = slow(spec_uri, "bad")
    job = operator.build_job(context)
    job.save()
    broken = job.model_dump_json().replace('"prepare"', '"no such kind"', 1)
    trigger = deferred_with(operator, context, broken)
    error = restore(event_of(trigger))
    assert isinstance(error, BadInput)
    assert "no such kind" in str(error)


def test_a_pod_that_is_deleted_under_its_job_is_a_lost_node(
    spec_uri: str, context: dict[str, Any], cluster: KubernetesBackend
) -> None:
    operator = slow(spec_uri, "deleted")
    trigger = deferred(operator, context)
    cluster._core.delete_namespaced_pod(pods.name_of(operator.folder), cluster._namespace, grace_period_seconds=0)
    assert isinstance(restore(event_of(trigger)), NodeLost)


def test_stop_returns_when_the_pod_is_gone(spec_uri: str, context: dict[str, Any], cluster: KubernetesBackend) -> None:
    operator = slow(spec_uri, "stopped")
    deferred(operator, context)
    assert cluster.stop(operator.folder, grace=1) is True
    assert cluster.state(operator.folder).phase is Phase.ABSENT
    assert cluster.stop(operator.folder) is False


class Slow(CorpusOperator):
    """A data job with a folder of its own, whose pod takes a while to come to anything."""

    folder_name = ""

    def output_of(self, spec: Pipeline, context: Any) -> str:
        return f"{super().output_of(spec, context)}-{self.folder_name}"


def slow(spec_uri: str, name: str) -> Slow:
    operator = Slow(task_id="task", spec=spec_uri)
    operator.folder_name = name
    return operator


def deferred_with(operator: JobOperator, context: dict[str, Any], document: str) -> Any:
    """Start a job whose document was damaged between the writing and the start."""
    build = operator.build_pod

    def damage(job: Any, given: Any) -> Any:
        store_for(job.output).write(job.uri, document.encode())
        return build(job, given)

    operator.build_pod = damage  # type: ignore[method-assign]
    return deferred(operator, context)
