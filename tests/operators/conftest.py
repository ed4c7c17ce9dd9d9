"""A store, a home and a stand-in program for the tests of the Airflow side."""

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

import asyncio
import importlib
import json
import sys
import time
import types
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from operators.backends.local import LocalBackend
from refit import proc
from refit.job import Job
from refit.pipeline import validate
from refit.spec import Pipeline
from refit.store import join

PROGRAM = Path(__file__).with_name("program.py")


@pytest.fixture(autouse=True)
def _nothing_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every job is waited for deferred, as one that takes long is; a test that wants otherwise says so."""
    monkeypatch.setattr("operators.job.QUICK_SECONDS", {})


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("REFIT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("REFIT_STORE", (tmp_path / "store").as_uri())
    monkeypatch.setenv("REFIT_BACKEND", "local")
    monkeypatch.setenv("REFIT_PROGRAMS", str(_installed(tmp_path / "bin")))
    monkeypatch.delenv("REFIT_DATABASE_URL", raising=False)
    yield tmp_path / "home"
    for folder in (tmp_path / "home" / "jobs").glob("*"):  # whatever a failed test left
        proc.kill_tree(None, tag=folder.name, grace=0)


@pytest.fixture
def spec() -> Pipeline:
    return validate(
        {
            "name": "line", "title": "A line", "team": "team", "owner": "owner@example.com",
            "data": {"sources": [{"name": "a", "uri": "cache://data/a.jsonl"}]},
            "train": {"base": "cache://models/base"},
        },
        "test",
    )  # fmt: skip


@pytest.fixture
def make_job(home: Path, tmp_path: Path, spec: Pipeline) -> Callable[..., Job]:
    def make(*act: tuple[str, Any], name: str = "one", kind: str = "train", **options: Any) -> Job:
        store = (tmp_path / "store").as_uri()
        return Job.build(
            kind, spec, store=store, output=join(store, "training", "line", name), options={"act": list(act), **options}
        )

    return make


@pytest.fixture
def backend(home: Path) -> LocalBackend:
    return LocalBackend()


@pytest.fixture
def until() -> Callable[..., Any]:
    """Wait until something is true; fails when it never becomes so."""

    def wait(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            found = condition()
            if found:
                return found
            time.sleep(0.02)
        raise AssertionError("it never came true")

    return wait


def _installed(folder: Path) -> Path:
    """`program.py` under the name of every stage's program."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("corpus", "trainer", "evaluator"):
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} {PROGRAM} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


class TaskInstance:
    """What an operator asks of Airflow's task instance."""

    def __init__(self, task_id: str = "task", state: str = "running", try_number: int = 1, max_tries: int = 3) -> None:
        self.dag_id, self.task_id, self.run_id, self.map_index = "retrain_line", task_id, "manual__1", -1
        self.try_number, self.max_tries = try_number, max_tries
        self.state = state

    def get_task_states(self, **_: Any) -> dict[str, dict[str, str]]:
        name = self.task_id if self.map_index < 0 else f"{self.task_id}_{self.map_index}"
        return {self.run_id: {name: self.state}}


@pytest.fixture
def context() -> dict[str, Any]:
    """A context as a task sees it, of a run that began now."""
    begun = types.SimpleNamespace(start_date=datetime.now(UTC), run_id="manual__1")
    return {"ti": TaskInstance(), "run_id": "manual__1", "dag_run": begun, "dag": types.SimpleNamespace()}


@pytest.fixture
def fire() -> Callable[[Any], dict[str, Any]]:
    """Run a trigger to its event, as the triggerer does: rebuilt from what it serializes to."""

    def run(trigger: Any, seconds: float = 60.0) -> dict[str, Any]:
        path, fields = trigger.serialize()
        module, name = path.rsplit(".", 1)
        rebuilt = getattr(importlib.import_module(module), name)(**json.loads(json.dumps(fields)))

        async def first() -> dict[str, Any]:
            async for event in rebuilt.run():
                return dict(event.payload)
            raise AssertionError("the trigger ended without an event")

        return asyncio.run(asyncio.wait_for(first(), seconds))

    return run
