"""A run's own folder in the store: what was asked for, which job each task does, how it ended.

jobs/<pipeline>/<run>/spec.json            the resolved spec, written by the run's first task
                      candidate.json       the release that this run made
                      champion.json        the release that it had to beat
                      first_champion.json  the release that it made for lack of one
                      tasks/<task>.json    which job a task does: where its progress and its events are
                      faults/<task>.txt    what a failed task died of, in its own words
                      early.json           why its training was stopped, if an early look at a checkpoint said so
                      outcome.json         one word and one sentence, written whatever happened
"""

from __future__ import annotations

import json
import re
import time
from typing import Any

from refit.job import Job
from refit.store import join, store_for

SPEC, CANDIDATE, CHAMPION, FIRST_CHAMPION = "spec.json", "candidate.json", "champion.json", "first_champion.json"
TASKS, FAULTS, OUTCOME, EARLY = "tasks", "faults", "outcome.json", "early.json"


def folder(store: str, pipeline: str, run_id: str) -> str:
    """The run's folder. Airflow's run ids hold colons and pluses, which a path should not."""
    return join(store, "jobs", pipeline, re.sub(r"[^A-Za-z0-9._-]+", "_", run_id))


def note(place: str, task_id: str, job: Job) -> None:
    """Write down which job a task of this run does."""
    record = {"task": task_id, "job": job.id, "kind": job.kind, "output": job.output, "at": time.time()}
    uri = join(place, TASKS, f"{task_id}.json")
    store_for(uri).write(uri, json.dumps(record).encode())


def noted(place: str) -> list[dict[str, Any]]:
    """The jobs of a run, in the order in which their tasks came to them."""
    store = store_for(place)
    names = store.children(join(place, TASKS))
    records = [json.loads(store.read(join(place, TASKS, name))) for name in names]
    return sorted(records, key=lambda record: float(record["at"]))


def refuse(place: str, why: str) -> None:
    """Write down why the training of this run is stopped; to be done before it is."""
    store_for(place).write(join(place, EARLY), json.dumps({"why": why}).encode())


def refused(place: str) -> str | None:
    """Why the training of this run was stopped early; None where it was not."""
    uri = join(place, EARLY)
    return str(json.loads(store_for(uri).read(uri))["why"]) if store_for(uri).exists(uri) else None


def note_fault(place: str, task_id: str, fault: str) -> None:
    """Write down what a task of this run died of."""
    uri = join(place, FAULTS, f"{task_id}.txt")
    store_for(uri).write(uri, fault.encode())


def faults(place: str) -> dict[str, str]:
    """Task id → what it died of."""
    store = store_for(place)
    names = store.children(join(place, FAULTS))
    return {name.removesuffix(".txt"): store.read(join(place, FAULTS, name)).decode() for name in names}
