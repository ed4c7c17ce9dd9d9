"""A store, a home and a stand-in program for the tests of the Airflow side."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from operators.backends.local import LocalBackend
from refit.job import Job
from refit.pipeline import validate
from refit.spec import Pipeline
from refit.store import join

PROGRAM = Path(__file__).with_name("program.py")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REFIT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("REFIT_STORE", (tmp_path / "store").as_uri())
    monkeypatch.setenv("REFIT_BACKEND", "local")
    monkeypatch.setenv("REFIT_PROGRAMS", str(_installed(tmp_path / "bin")))
    monkeypatch.delenv("REFIT_DATABASE_URL", raising=False)
    return tmp_path / "home"


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
def backend(home: Path) -> Iterator[LocalBackend]:
    made = LocalBackend()
    yield made
    for folder in (home / "jobs").glob("*"):  # whatever a failed test left
        from refit import proc

        proc.kill_tree(None, tag=folder.name, grace=0)


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
