"""kill -9 while a line trains: it goes on from its last checkpoint, with one process, and ends right."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from refit.proc import Identity, alive
from tests.scenarios.house import House, Run, events, steps, until, working_on

LONG = {"train__max_steps": "200", "train__checkpoint__every_steps": "20"}


def command(identity: Identity) -> str:
    return Path(f"/proc/{identity.pid}/cmdline").read_text().replace("\0", " ")


def trainers(output: Path) -> list[Identity]:
    """The processes that train into a folder: the launcher first, then its ranks."""
    return sorted((i for i in working_on(output) if "trainer" in command(i)), key=lambda identity: identity.started)


def at_step(run: Run, step: int) -> Path:
    output = run.output("train.train")
    until(lambda: max(steps(output), default=0) >= step, 300, f"step {step}")
    return output


def ends_right(house: House, run: Run, output: Path, last: int) -> None:
    users = house.users(f"kills-{house.seed}")
    users.ask(run.heldout(), rate=8)
    try:
        outcome = run.end()
    finally:
        users.leave()
    assert outcome["outcome"] == "promoted", outcome["why"]
    assert steps(output) == list(range(1, last + 1))
    assert events(output)[-1]["state"] == "succeeded"
    assert trainers(output) == []


@pytest.mark.parametrize("victim", ["rank", "launcher"])
def test_a_killed_training_goes_on_from_its_last_checkpoint(
    house: House, first_run: dict[str, Any], victim: str
) -> None:
    run = house.start(**LONG)
    output = at_step(run, 45)
    launcher, *ranks = trainers(output)
    assert ranks
    os.kill((ranks[-1] if victim == "rank" else launcher).pid, signal.SIGKILL)
    until(lambda: not any(alive(rank) for rank in ranks), 60, "every rank of the killed attempt is gone")
    ends_right(house, run, output, 200)


def test_airflow_loses_triggerer_and_scheduler_and_the_training_does_not_notice(
    house: House, first_run: dict[str, Any]
) -> None:
    run = house.start(**LONG)
    output = at_step(run, 10)
    started = trainers(output)[0]
    for program in ("airflow-triggerer", "airflow-scheduler"):
        house.kill(program)
    ends_right(house, run, output, 200)
    assert [event["attempt"] for event in events(output) if event["state"] == "running"] == [1]
    assert not alive(started)


def test_a_worker_killed_between_start_and_deferral_leaves_one_job_that_the_retry_adopts(
    house: House, first_run: dict[str, Any]
) -> None:
    """airflow#39791, airflow#10544: the retry finds the living job, and never starts a second."""
    run = house.start(**LONG)
    output = run.output("train.train")  # noted just before the job is started
    while not trainers(output):
        time.sleep(0.005)
    for worker in workers():
        os.kill(worker, signal.SIGKILL)
    first = trainers(output)[0]
    at_step(run, 30)
    assert trainers(output)[0] == first
    ends_right(house, run, output, 200)
    assert run.tries("train.train") == 2
    assert [event["attempt"] for event in events(output) if event["state"] == "running"] == [1]


def workers() -> list[int]:
    """Airflow's task processes that run now."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "cmdline").read_text()
            except OSError:
                continue
            if text.startswith("airflow worker -- ") and len(text.split(" -- ")[1].strip("\0 ")) > 30:
                found.append(int(entry.name))
    return found
