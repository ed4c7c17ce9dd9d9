"""The stack of the scenarios and the runs on it, used as a person would: by commands, REST, and kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from refit import runs
from refit.job import EVENTS, read_events
from refit.proc import Identity
from refit.store import store_for
from standalone.airflow import Airflow
from standalone.controller import Controller
from standalone.demo.users import StandIn
from standalone.environment import for_programs, variables
from standalone.home import Home, root
from standalone.ports import free_ports
from standalone.record import Record

PIPELINE = "tiny"
DAG_ID = f"retrain_{PIPELINE}"
BIN = root() / ".venv" / "bin"

QUICK = {
    "train.max_steps": "60",
    "train.checkpoint.every_steps": "10",
    "evaluate.max_items": "60",
    "evaluate.gate.min_items": "30",
    "rollout.steps": "[50, 100]",
    "rollout.shadow_pairs": "0",
    "rollout.min_events": "10",
    "rollout.min_seconds": "2",
    "rollout.margin": "0.5",
}
"""A line that takes seconds where a scenario is about something else."""


def until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """What `condition` gives as soon as it is true; fails the test when it does not come true in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.2)
    pytest.fail(f"{what}: not within {seconds:.0f} s")


class House:
    """The stack of the scenarios, used as a person would: by commands, REST, and kill."""

    def __init__(self, folder: Path) -> None:
        self.home = Home(folder / "home")
        self.ports = free_ports()
        self.environment = {**os.environ, **self.ports.variables(), "REFIT_HOME": str(self.home.path)}
        self.environment.pop("REFIT_STORE", None)
        self.seed = 100

    def refit(self, *arguments: str, code: int = 0, **variables: str) -> dict[str, Any]:
        """Run `refit`; the JSON object it ends with."""
        done = subprocess.run(
            [BIN / "refit", *arguments],
            env={**self.environment, **variables},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stderr[-4000:]
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer

    @property
    def controller(self) -> Controller:
        return Controller(self.home)

    def line(self) -> dict[str, Any]:
        """What serves the line now."""
        return self.controller.line(PIPELINE)

    def split(self) -> int:
        """The candidate's share of users, read back from Envoy."""
        record = Record.read(self.home)
        assert record is not None
        environment = for_programs(self.home, variables(self.home, record.ports, record.socket), self.environment)
        done = subprocess.run([BIN / "serving", "split", PIPELINE], env=environment, capture_output=True, check=True)
        return int(json.loads(done.stdout.splitlines()[-1])["weight"])

    def start(self, *, fresh: bool = True, **settings: str) -> Run:
        """Start a quick run; `fresh` gives it a training of its own, and lets it through the gate."""
        chosen = dict(QUICK)
        if fresh:
            self.seed += 1
            chosen |= {"train.seed": str(self.seed), "evaluate.gate.force": "true"}
        chosen |= {name.replace("__", "."): value for name, value in settings.items()}
        sets = [word for name, value in chosen.items() for word in ("--set", f"{name}={value}")]
        return Run(self, self.refit("run", PIPELINE, *sets)["run_id"])

    def trigger(self, conf: dict[str, Any]) -> Run:
        """Start a run as the trigger form does, without the checks of the command line."""
        with Airflow(self.home) as airflow:
            until(lambda: airflow.knows(DAG_ID), 180, f"Airflow knows {DAG_ID}")
            airflow.unpause(DAG_ID)
            return Run(self, airflow.trigger(DAG_ID, conf))

    def pid(self, program: str) -> int:
        """The process of a program of the stack that runs now."""
        pid = self.refit("status")["programs"][program]["pid"]
        assert pid, f"{program} does not run"
        return int(pid)

    def kill(self, program: str) -> None:
        """kill -9, and wait until another process does its work."""
        old = self.pid(program)
        os.kill(old, signal.SIGKILL)
        until(lambda: self._is_back(program, old), 180, f"{program} is back")

    def _is_back(self, program: str, old: int) -> bool:
        now = self.refit("status")["programs"][program]
        return bool(now["ready"]) and now["pid"] != old

    def users(self, name: str) -> StandIn:
        """Replayed users of the line."""
        record = Record.read(self.home)
        assert record is not None
        environment = for_programs(self.home, variables(self.home, record.ports, record.socket), self.environment)
        return StandIn(PIPELINE, self.home.path / name, environment)


class Run:
    """One run of the line."""

    def __init__(self, house: House, run_id: str) -> None:
        self.house, self.id = house, run_id
        self.folder = runs.folder(house.home.store.as_uri(), PIPELINE, run_id)

    def states(self) -> dict[str, str | None]:
        """Task id → state."""
        with Airflow(self.house.home) as airflow:
            return {task["task_id"]: task["state"] for task in airflow.tasks(DAG_ID, self.id)}

    def task(self, task_id: str) -> dict[str, Any]:
        """A task as Airflow has it."""
        with Airflow(self.house.home) as airflow:
            return next(task for task in airflow.tasks(DAG_ID, self.id) if task["task_id"] == task_id)

    def tries(self, task_id: str) -> int:
        """How often a task was tried."""
        return int(self.task(task_id)["try_number"])

    def output(self, task_id: str) -> Path:
        """The folder of the job that a task does; waits until the task has come to it."""
        record = until(lambda: self._noted(task_id), 300, f"{task_id} starts")
        return Path(record["output"].removeprefix("file://"))

    def _noted(self, task_id: str) -> dict[str, Any] | None:
        return next((record for record in runs.noted(self.folder) if record["task"] == task_id), None)

    def heldout(self) -> Path:
        """The held-out items of the run's dataset."""
        output = self.output("prepare_data.corpus").as_uri()
        manifest = until(lambda: store_for(output).manifest(output), 120, "the dataset")
        return Path(manifest.outputs["dataset"].removeprefix("file://")) / "heldout.parquet"

    def at_share(self, share: int) -> None:
        """Wait until so many percent of users meet the candidate."""
        until(lambda: self.house.line()["weight"] == share, 420, f"the split is at {share} %")

    def end(self, seconds: float = 600) -> dict[str, Any]:
        """Wait for the run's end; its outcome document."""
        with Airflow(self.house.home) as airflow:
            until(lambda: airflow.run(DAG_ID, self.id)["state"] in ("success", "failed"), seconds, f"{self.id} ends")
        text = store_for(self.folder).read(f"{self.folder}/{runs.OUTCOME}")
        document: dict[str, Any] = json.loads(text)
        return document


def events(output: Path) -> list[dict[str, Any]]:
    """What a job wrote down."""
    return read_events((output / EVENTS).read_text(encoding="utf-8"))


def steps(output: Path) -> list[int]:
    """The steps in a training's metrics, in their order."""
    file = output / "metrics.jsonl"
    return [int(record["step"]) for record in read_events(file.read_text(encoding="utf-8"))] if file.exists() else []


def working_on(output: Path) -> list[Identity]:
    """Processes whose environment names this output."""
    found = []
    for identity in Path("/proc").iterdir():
        if identity.name.isdigit():
            try:
                environment = (identity / "environ").read_bytes()
            except OSError:
                continue
            if str(output).encode() in environment:
                found.append(Identity.of(int(identity.name)))
    return found
