"""Pod specs, as they go to the cluster: compared with golden files, and validated against Kubernetes' own schemas.

`REFIT_GOLDEN=write` writes the files anew; look at the difference before you commit it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes.client import ApiClient

from operators import nodes, pods, run
from operators.data import CorpusOperator
from operators.job import JobOperator
from operators.training import DeepSpeedOperator
from refit import runs
from refit.manifest import Manifest
from refit.spec import Pipeline
from refit.store import join, store_for

GOLDEN = Path(__file__).with_name("golden")


@pytest.fixture
def place(home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A cluster's settings; gives the store's address."""
    monkeypatch.setenv("REFIT_BACKEND", "kubernetes")
    monkeypatch.setenv("REFIT_IMAGES", "registry.example/refit-{stage}:1.0")
    monkeypatch.setenv("REFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("REFIT_POD_TEMPLATE", raising=False)
    return (tmp_path / "store").as_uri()


def committed(uri: str, kind: str) -> str:
    store_for(uri).write(
        join(uri, "manifest.json"), Manifest(kind=kind, fingerprint="f" * 32).model_dump_json().encode()
    )
    return uri


def spec_uri(spec: Pipeline, train: dict[str, Any]) -> str:
    changed = spec.model_copy(update={"train": spec.train.model_copy(update=train)})
    return run.write(changed, join(run.folder("line", "manual__1"), runs.SPEC))


def document(operator: JobOperator, context: dict[str, Any]) -> dict[str, Any]:
    """What would be sent: a pod, or a Job with its Service."""
    job = operator.build_job(context)
    pod = operator.build_pod(job, context)
    if job.spec.train.nodes > 1:
        work = pods.indexed_job(pod, job.spec.train.nodes)
        return {"job": ApiClient().sanitize_for_serialization(work),
                "service": ApiClient().sanitize_for_serialization(pods.headless_service(work))}  # fmt: skip
    return {"pod": ApiClient().sanitize_for_serialization(pod)}


def prepare(place: str, spec: Pipeline) -> JobOperator:
    return CorpusOperator(task_id="corpus", spec=spec_uri(spec, {}))


def train(place: str, spec: Pipeline) -> JobOperator:
    dataset = committed(join(place, "datasets/line/pack/d"), "dataset")
    committed("cache://models/base", "model")
    return DeepSpeedOperator(
        task_id="train", spec=spec_uri(spec, {"gpus_per_node": 8, "queue": "research"}), inputs={"dataset": dataset}
    )


def train_on_four_nodes(place: str, spec: Pipeline) -> JobOperator:
    dataset = committed(join(place, "datasets/line/pack/d"), "dataset")
    committed("cache://models/base", "model")
    uri = spec_uri(spec, {"gpus_per_node": 8, "nodes": 4, "queue": "research"})
    return DeepSpeedOperator(task_id="train", spec=uri, inputs={"dataset": dataset})


CASES: list[Callable[[str, Pipeline], JobOperator]] = [prepare, train, train_on_four_nodes]


@pytest.mark.parametrize("make", CASES, ids=lambda case: case.__name__)
def test_a_pod_is_as_it_was_agreed(
    make: Callable[[str, Pipeline], JobOperator], place: str, spec: Pipeline, context: dict[str, Any]
) -> None:
    from airflow.version import version

    operator = make(place, spec)
    found = document(operator, context)
    text = yaml.safe_dump_all([part for _, part in sorted(found.items())], sort_keys=True)
    # What differs from machine to machine: the store, and the name that follows from it.
    for real, name in ((version, "airflow"), (place, "file:///store"), (pods.name_of(operator.folder), "refit-job-0")):
        text = text.replace(real, name)
    golden = GOLDEN / f"{make.__name__}.yaml"
    if os.environ.get("REFIT_GOLDEN") == "write":
        golden.write_text(text)
    assert text == golden.read_text()


def test_a_training_keeps_away_from_nodes_in_quarantine(
    place: str, spec: Pipeline, context: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which ones they are is Postgres' to say (tests/integration/test_nodes.py).

    Where they are all there is, it takes one of them: a rule that must hold would leave it pending for good.
    """
    monkeypatch.setattr(nodes, "quarantined", lambda: ["node-3", "node-7"])
    rule = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["node-3", "node-7"]}
    wanted = [{"weight": 100, "preference": {"matchExpressions": [rule]}}]
    for make, holder in ((train, "pod"), (train_on_four_nodes, "job")):
        found = document(make(place, spec), context)[holder]
        pod = found if holder == "pod" else found["spec"]["template"]
        affinity = pod["spec"]["affinity"]["nodeAffinity"]
        assert affinity == {"preferredDuringSchedulingIgnoredDuringExecution": wanted}
    assert not document(prepare(place, spec), context)["pod"]["spec"]["affinity"], "what waits for nobody may go there"


def validate(path: Path) -> tuple[int, str]:
    """What Kubernetes' own schemas say of a file: exit code and words."""
    program = Path(sys.executable).with_name("kubernetes-validate")
    checked = subprocess.run([program, "--strict", path], capture_output=True, text=True, check=False)
    return checked.returncode, checked.stdout + checked.stderr


@pytest.mark.parametrize("name", [case.__name__ for case in CASES])
def test_kubernetes_own_schemas_take_it(name: str) -> None:
    code, words = validate(GOLDEN / f"{name}.yaml")
    assert code == 0, words


def test_a_wrong_field_would_be_noticed(tmp_path: Path) -> None:
    document = yaml.safe_load((GOLDEN / "train.yaml").read_text())
    document["spec"]["restartPolicyy"] = "Never"
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(document))
    code, words = validate(tmp_path / "wrong.yaml")
    assert code != 0
    assert "restartPolicyy" in words


def test_a_pod_holds_the_address_of_its_job_and_no_secret(place: str, spec: Pipeline, context: dict[str, Any]) -> None:
    operator = prepare(place, spec)
    job = operator.build_job(context)
    (container,) = operator.build_pod(job, context).spec.containers  # and no sidecar
    given = {variable.name: variable.value for variable in container.env}
    image = "registry.example/refit-data:1.0"
    assert given == {"REFIT_JOB": job.uri, "REFIT_STORE": place, "REFIT_IMAGE": image, "PYTHONUNBUFFERED": "1"}


def test_a_pod_s_name_follows_from_its_output_on_every_try(place: str, spec: Pipeline, context: dict[str, Any]) -> None:
    names = set()
    for number in (1, 2):
        context["ti"].try_number = number
        operator = train(place, spec)
        names.add(operator.build_pod(operator.build_job(context), context).metadata.name)
    assert len(names) == 1
    assert len(names.pop()) <= 63


def test_a_cluster_s_own_template_lies_below(
    place: str, spec: Pipeline, context: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = tmp_path / "pod.yaml"
    template.write_text(yaml.safe_dump({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "t"},
        "spec": {"tolerations": [{"key": "gpu", "operator": "Exists"}],
                 "containers": [{"name": "base", "image": "ignored",
                                 "volumeMounts": [{"name": "store", "mountPath": "/store"}]}],
                 "volumes": [{"name": "store", "persistentVolumeClaim": {"claimName": "store"}}]},
    }))  # fmt: skip
    monkeypatch.setenv("REFIT_POD_TEMPLATE", str(template))
    operator = prepare(place, spec)
    pod = operator.build_pod(operator.build_job(context), context)
    assert pod.spec.tolerations[0].key == "gpu"
    assert pod.spec.volumes[0].persistent_volume_claim.claim_name == "store"
    assert pod.spec.containers[0].volume_mounts[0].mount_path == "/store"
    assert pod.spec.containers[0].image == "registry.example/refit-data:1.0"
