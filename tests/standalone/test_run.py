"""`refit run`: settings become the form's values, and what is wrong is said before anything is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from refit import runs
from refit.errors import BadInput, BadSpec, ServerUnavailable
from refit.manifest import Manifest
from refit.store import join, store_for
from standalone import run
from standalone.watch import Watch


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One good line, whose data and base model are there, and one broken file."""
    folder = tmp_path / "pipelines"
    folder.mkdir()
    (tmp_path / "data.jsonl").write_text("{}\n")
    base = (tmp_path / "base").as_uri()
    store_for(base).write(
        join(base, "manifest.json"), Manifest(kind="model", fingerprint="f").model_dump_json().encode()
    )
    document = {
        "name": "good", "title": "Good", "team": "team", "owner": "owner@example.com",
        "data": {"sources": [{"name": "a", "uri": (tmp_path / "data.jsonl").as_uri()}]}, "train": {"base": base},
    }  # fmt: skip
    (folder / "good.yaml").write_text(yaml.safe_dump(document))
    (folder / "bad.yaml").write_text("name: [")
    monkeypatch.setenv("REFIT_PIPELINES", str(folder))
    return folder


def test_a_field_of_the_form_is_one_and_the_rest_are_overrides(lines: Path) -> None:
    conf = run.form_values(
        "good", ["train.max_steps=60", "train.ranks=2", "train.accumulation=2", "serve.dtype=float32"]
    )
    assert conf == {
        "train.max_steps": 60,
        "overrides": {"train": {"ranks": 2, "accumulation": 2}, "serve": {"dtype": "float32"}},
    }


def test_settings_are_checked_together_not_one_by_one(lines: Path) -> None:
    with pytest.raises(BadSpec, match="multiple of ranks"):
        run.form_values("good", ["train.ranks=2"])


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["train.max_steps=0"], "train.max_steps is 0"),
        (["train.max_stepps=5"], "Did you mean max_steps?"),
        (["trian.max_steps=5"], "Did you mean train?"),
        (["train.max_steps"], "expected NAME=VALUE"),
        (["train.base=file:///nowhere"], "no model"),
    ],
)
def test_what_is_wrong_is_said_by_name(lines: Path, sets: list[str], words: str) -> None:
    with pytest.raises(BadInput) as caught:
        run.form_values("good", sets)
    assert words in str(caught.value)


def test_an_unknown_line_is_answered_with_the_known_ones(lines: Path) -> None:
    with pytest.raises(BadInput, match="the lines are bad, good"):
        run.form_values("goood", [])
    with pytest.raises(BadSpec, match="not valid YAML"):
        run.form_values("bad", [])


class FakeAirflow:
    """A run whose state and tasks the test sets."""

    def __init__(self) -> None:
        self.state = "running"
        self.states: list[dict[str, Any]] = []

    def run(self, dag_id: str, run_id: str) -> dict[str, Any]:
        assert (dag_id, run_id) == ("retrain_good", "manual__1+00:00")
        return {"state": self.state}

    def tasks(self, dag_id: str, run_id: str) -> list[dict[str, Any]]:
        return self.states


def test_a_person_sees_which_stage_how_far_and_how_long_still(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, airflow = tmp_path.as_uri(), FakeAirflow()
    place = runs.folder(store, "good", "manual__1+00:00")
    output = join(store, "training/good/f")
    store_for(place).write(join(place, "tasks/train.train.json"), json.dumps({"output": output}).encode())
    watch = Watch(airflow, store, "good", "manual__1+00:00")  # type: ignore[arg-type]
    airflow.states = [{"task_id": "train.train", "state": "deferred", "try_number": 1}]
    status = {"phase": "train", "done": 45, "total": 100, "seconds_left": 130, "loss": 1.93}
    store_for(output).write(join(output, "status.json"), json.dumps(status).encode())
    assert watch.look() == "running"
    assert watch.look() == "running"
    (said,) = capsys.readouterr().err.splitlines()  # nothing new, nothing said twice
    assert "training" in said
    assert "train 45 %, 2 min left, loss 1.93" in said


def test_a_rollout_says_what_it_waits_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    airflow = FakeAirflow()
    airflow.states = [{"task_id": "roll_out.step_1", "state": "deferred", "try_number": 1}]
    rollout = {"weight": 5, "verdict": "wait", "why": "11 of 40 feedback events on the challenger's side"}
    watch = Watch(airflow, tmp_path.as_uri(), "good", "manual__1+00:00", lambda: rollout)  # type: ignore[arg-type]
    watch.look()
    rollout["why"] = "12 of 40 feedback events on the challenger's side"
    watch.look()
    (said,) = capsys.readouterr().err.splitlines()
    assert "step_1          5 % of users: 11 of 40 feedback events on the challenger's side" in said
    rollout |= {"verdict": "pass", "why": "not worse"}
    watch.look()
    assert "5 % of users: not worse" in capsys.readouterr().err


def test_a_controller_that_is_away_stops_nobody_from_watching(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    airflow = FakeAirflow()
    airflow.states = [{"task_id": "roll_out.step_1", "state": "deferred", "try_number": 1}]

    def away() -> None:
        raise ServerUnavailable("it does not answer")

    assert Watch(airflow, tmp_path.as_uri(), "good", "manual__1+00:00", away).look() == "running"  # type: ignore[arg-type]
    assert "waiting" in capsys.readouterr().err


def test_a_task_that_is_tried_again_is_mentioned_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, airflow = tmp_path.as_uri(), FakeAirflow()
    output, place = join(store, "training/good/f"), runs.folder(store, "good", "manual__1+00:00")
    store_for(place).write(join(place, "tasks/train.train.json"), json.dumps({"output": output}).encode())
    store_for(output).write(join(output, "status.json"), b'{"phase": "train", "done": 0, "total": 100}')
    airflow.states = [{"task_id": "train.train", "state": "up_for_retry", "try_number": 1}]
    watch = Watch(airflow, store, "good", "manual__1+00:00")  # type: ignore[arg-type]
    for _ in range(3):
        watch.look()
    (said,) = capsys.readouterr().err.splitlines()
    assert "failed, is tried again" in said


def test_the_outcome_is_the_run_s_own_word(tmp_path: Path) -> None:
    store, airflow = tmp_path.as_uri(), FakeAirflow()
    watch = Watch(airflow, store, "good", "manual__1+00:00")  # type: ignore[arg-type]
    assert watch.outcome("failed")["outcome"] == "failed"
    place = runs.folder(store, "good", "manual__1+00:00")
    store_for(place).write(join(place, "outcome.json"), b'{"outcome": "stopped at gate", "why": "not better"}')
    airflow.states = [{"task_id": "evaluate.gate", "state": "failed", "try_number": 1}]
    document = watch.outcome("failed")
    assert (document["outcome"], document["failed_tasks"]) == ("stopped at gate", ["evaluate.gate"])
