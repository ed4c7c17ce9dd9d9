"""A line that asks for machines: a new file is a new line, its shares are mapped, one that dies is retried alone."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from refit import runs
from refit.proc import Identity
from refit.store import cache_folder
from standalone.airflow import Airflow
from standalone.home import root
from tests.scenarios.house import House, events, until, working_on

NAME = "scenario_shares"
DAG_ID = f"retrain_{NAME}"
PIPELINES = root() / "dags" / "pipelines"


@pytest.fixture
def line(house: House) -> Iterator[str]:
    """The tiny line under another name, on three machines, the first with enough to do to be caught at it."""
    mail = house.home.path / "mail.jsonl"
    rows = [json.loads(row) for row in (cache_folder() / "data/tiny/mail.jsonl").read_text().splitlines()]
    with mail.open("w") as delivered:
        for number in range(80_000):
            row = rows[number % len(rows)]
            delivered.write(json.dumps({**row, "instruction": f"{row['instruction']} (ticket {number})"}) + "\n")
    spec: dict[str, Any] = yaml.safe_load((PIPELINES / "tiny.yaml").read_text())
    spec |= {"name": NAME, "title": "Tickets on three machines"}
    spec["data"]["machines"] = 3
    spec["data"]["sources"][0]["uri"] = mail.as_uri()
    file = PIPELINES / f"{NAME}.yaml"
    file.write_text(yaml.safe_dump(spec))
    try:
        yield DAG_ID
    finally:
        file.unlink()


def test_a_share_whose_process_is_killed_is_retried_and_the_others_are_not(house: House, line: str) -> None:
    with Airflow(house.home) as airflow:
        until(lambda: airflow.knows(line), 180, "the new file is a line")
        airflow.unpause(line)
        run = airflow.trigger(line, {})
        folder = runs.folder(house.home.store.as_uri(), NAME, run)
        share = until(lambda: noted(folder, "prepare_data.shares-0"), 180, "the first share starts")
        # Before its job says that it runs, a start that is killed is made again by the same try.
        until(lambda: phase(share) in ("ingest", "clean"), 60, "it is at work")
        os.kill(programs(share)[-1].pid, signal.SIGKILL)
        until(lambda: state(airflow, run, "prepare_data.corpus") == "success", 300, "the dataset")
        # Jobs are counted, not tries: Airflow may take a short deferral for a crash, and the job answers the next try.
        shares = [noted(folder, f"prepare_data.shares-{number}") for number in range(3)]
        started = [sum(event["state"] == "running" for event in events(one)) for one in shares]
        assert started == [2, 1, 1]
        prepared = json.loads((noted(folder, "prepare_data.corpus") / "manifest.json").read_text())
        in_shards = [told for told in prepared["facts"]["phases"] if "shards" in told]
        made = {told["name"]: (told["shards"], told["shards_made"]) for told in in_shards}
        assert made == dict.fromkeys(("ingest", "clean", "tokenize", "sign"), (3, 0)) | {"match": (4, 0)}
        airflow.ask("PATCH", f"/api/v2/dags/{line}/dagRuns/{run}", json={"state": "failed"})
        until(lambda: not working_on(house.home.store / "training" / NAME), 60, "nothing of the run is left")


def noted(folder: str, task: str) -> Any:
    """The folder of the job that a task of the run does; None while it has not come to it."""
    record = next((record for record in runs.noted(folder) if record["task"] == task), None)
    return record and Path(record["output"].removeprefix("file://"))


def phase(output: Path) -> str | None:
    """What a job says that it does."""
    status = output / "status.json"
    return json.loads(status.read_text())["phase"] if status.exists() else None


def programs(output: Path) -> list[Identity]:
    """The data stage's processes that work on a job, the eldest first."""
    found = [one for one in working_on(output) if b"bin/corpus" in Path(f"/proc/{one.pid}/cmdline").read_bytes()]
    return sorted(found, key=lambda one: one.started)


def state(airflow: Airflow, run: str, task_id: str) -> str | None:
    return next(task["state"] for task in airflow.tasks(DAG_ID, run) if task["task_id"] == task_id)
