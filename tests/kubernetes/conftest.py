"""A cluster, a store that its nodes see, and tiny data and a tiny base model in it."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

# Before anything imports Airflow: it makes its home where it is first imported.
if "AIRFLOW_HOME" not in os.environ:
    os.environ["AIRFLOW_HOME"] = tempfile.mkdtemp(prefix="refit-test-airflow-")
    atexit.register(shutil.rmtree, os.environ["AIRFLOW_HOME"], ignore_errors=True)
os.environ.setdefault("AIRFLOW__CORE__LOAD_EXAMPLES", "False")

import json
import shutil
import subprocess
import types
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from operators import run
from operators.backends.kubernetes import KubernetesBackend
from refit import runs
from refit.pipeline import validate
from refit.spec import Pipeline
from refit.store import join

ROOT = Path(__file__).resolve().parents[2]
RUN = "manual__kubernetes"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("kubernetes")
            if not os.environ.get("KUBECONFIG"):
                item.add_marker(pytest.mark.skip(reason="KUBECONFIG is not set: there is no cluster to test against"))


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder that this machine and the cluster's nodes see under one path."""
    base = os.environ.get("REFIT_KUBERNETES_FOLDER") or tempfile.gettempdir()
    made = Path(tempfile.mkdtemp(prefix="refit-kubernetes-", dir=base))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture(scope="module")
def spec(folder: Path) -> Pipeline:
    """The smallest line that really learns, with its data and base model."""
    tickets = [
        {"instruction": f"Ticket {number}: please {word} order {number * 7}", "input": "",
         "output": json.dumps({"intent": word})}
        for number in range(120) for word in ("refund", "cancel", "praise")
    ]  # fmt: skip
    data = folder / "cache/data/tickets.jsonl"
    data.parent.mkdir(parents=True)
    data.write_text("".join(json.dumps(ticket) + "\n" for ticket in tickets))
    base = folder / "cache/models/seed"
    subprocess.run(
        [ROOT / ".venv/bin/trainer", "seed", base.as_uri(), "--corpus", data], check=True, stdout=subprocess.DEVNULL
    )
    return validate(
        {
            "name": "tickets", "title": "Tickets", "team": "team", "owner": "owner@example.com",
            "data": {"sources": [{"name": "mail", "uri": data.as_uri(), "format": "alpaca"}], "label_key": "intent",
                     "dedup": {"threshold": 1.0}, "expect": {"min_records": 50}},
            "train": {"base": base.as_uri(), "method": "full", "max_steps": 6, "learning_rate": 0.003,
                      "warmup_steps": 2, "micro_batch": 2, "checkpoint": {"every_steps": 3}},
        },
        "tests/kubernetes",
    )  # fmt: skip


@pytest.fixture(autouse=True)
def cluster(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesBackend]:
    """The backend, with a pod template that mounts the folder; whatever a test leaves is deleted."""
    template = folder / "pod.yaml"
    template.write_text(yaml.safe_dump({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "template"},
        "spec": {
            "volumes": [{"name": "store", "hostPath": {"path": str(folder), "type": "Directory"}}],
            "containers": [{"name": "base", "image": "template", "resources": {"requests": {"cpu": "100m"}},
                            "env": [{"name": "HOME", "value": "/tmp"}],
                            "volumeMounts": [{"name": "store", "mountPath": str(folder)}]}],
        },
    }))  # fmt: skip
    monkeypatch.setenv("REFIT_BACKEND", "kubernetes")
    monkeypatch.setenv("REFIT_NAMESPACE", os.environ.get("REFIT_NAMESPACE", "default"))
    monkeypatch.setenv("REFIT_STORE", (folder / "store").as_uri())
    monkeypatch.setenv("REFIT_CACHE", str(folder / "cache"))
    monkeypatch.setenv("REFIT_POD_TEMPLATE", str(template))
    monkeypatch.delenv("REFIT_DATABASE_URL", raising=False)
    backend = KubernetesBackend()
    yield backend
    for record in runs.noted(run.folder("tickets", RUN)):
        backend.stop(record["output"], grace=0)


@pytest.fixture
def spec_uri(cluster: KubernetesBackend, spec: Pipeline) -> str:
    return run.write(spec, join(run.folder(spec.name, RUN), runs.SPEC))


@pytest.fixture
def context() -> dict[str, Any]:
    ti = types.SimpleNamespace(
        dag_id="retrain_tickets", task_id="task", run_id=RUN, map_index=-1, try_number=1,
        get_task_states=lambda **_: {RUN: {"task": "running"}},
    )  # fmt: skip
    begun = types.SimpleNamespace(start_date=datetime.now(UTC), run_id=RUN)
    return {"ti": ti, "run_id": RUN, "dag_run": begun, "dag": types.SimpleNamespace()}
