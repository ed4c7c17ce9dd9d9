"""Shows a run while it goes on: which stage, how far, how long still. Airflow knows the tasks, the store how far jobs
are, the controller what a rollout waits for."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from refit import progress, runs
from refit.errors import RefitError
from refit.store import join, store_for
from standalone.airflow import Airflow

STAGES = {
    "check": "check",
    "prepare_data": "data",
    "first_champion": "first champion",
    "train": "training",
    "evaluate": "evaluation",
    "promote": "promotion",
    "roll_out": "rollout",
}
"""The first part of a task's id → the stage, as people call it."""

SAY_SECONDS = 15.0
"""A line at least this often."""

GOING = ("running", "deferred", "up_for_reschedule", "awaiting_input", "restarting")


class Watch:
    """One run, looked at again and again; `rollout` gives the line's running rollout, or None."""

    def __init__(
        self,
        airflow: Airflow,
        store: str,
        pipeline: str,
        run_id: str,
        rollout: Callable[[], dict[str, Any] | None] = lambda: None,
    ) -> None:
        self._airflow = airflow
        self._rollout = rollout
        self._dag_id = f"retrain_{pipeline}"
        self._run_id = run_id
        self._folder = runs.folder(store, pipeline, run_id)
        self._began = time.monotonic()
        self._said: dict[str, str] = {}
        self._said_at = 0.0

    def look(self) -> str:
        """Say what is new; returns the run's state."""
        state = str(self._airflow.run(self._dag_id, self._run_id)["state"])
        tasks = self._airflow.tasks(self._dag_id, self._run_id)
        going = [task for task in tasks if task["state"] in GOING]
        for task in tasks:
            if task["state"] in ("failed", "up_for_retry") and self._news(
                task["task_id"], f"{task['state']}{task['try_number']}"
            ):
                self._say(task["task_id"], "failed" if task["state"] == "failed" else "failed, is tried again")
        for task in going:
            words, step = self._words(task)
            due = time.monotonic() - self._said_at > SAY_SECONDS
            if self._news(task["task_id"], f"{task['state']}{step}") or (due and words):
                self._say(task["task_id"], words)
        return state

    def outcome(self, state: str) -> dict[str, Any]:
        """How the run ended, in the run's own words where it could still write them."""
        try:
            document = json.loads(store_for(self._folder).read(join(self._folder, runs.OUTCOME)))
        except (FileNotFoundError, ValueError):
            document = {"outcome": "failed" if state == "failed" else state, "why": "the run wrote no outcome"}
        broken = [
            task["task_id"] for task in self._airflow.tasks(self._dag_id, self._run_id) if task["state"] == "failed"
        ]
        return {**document, "state": state, "failed_tasks": broken}

    def _words(self, task: dict[str, Any]) -> tuple[str, int]:
        """What a task does now, and how many tenths of it are done."""
        status = self._status(task["task_id"])
        if status is None and task["state"] == "deferred":
            return self._waiting(task["task_id"])
        if status is None:
            return "waits for a person" if task["state"] == "awaiting_input" else "", 0
        return progress.line(status), int(progress.share(status) * 10)

    def _waiting(self, task_id: str) -> tuple[str, int]:
        """What a deferred task waits for: in a rollout the words of the latest verdict, which are news when they change
        its kind."""
        try:
            rollout = self._rollout() if task_id.startswith("roll_out.") else None
        except RefitError:  # the controller may be restarted under a run
            rollout = None
        if rollout is None:
            return "waiting", 0
        return f"{rollout['weight']} % of users: {rollout['why'] or 'waiting'}", hash(rollout["verdict"])

    def _status(self, task_id: str) -> dict[str, Any] | None:
        store = store_for(self._folder)
        try:
            record = json.loads(store.read(join(self._folder, runs.TASKS, f"{task_id}.json")))
        except (FileNotFoundError, ValueError):
            return None
        return progress.status_of(record["output"])

    def _news(self, task_id: str, now: str) -> bool:
        if self._said.get(task_id) == now:
            return False
        self._said[task_id] = now
        return True

    def _say(self, task_id: str, words: str) -> None:
        group, _, name = task_id.partition(".")
        stage = STAGES.get(group, group)
        passed = time.monotonic() - self._began
        text = f"{int(passed) // 60:3d}:{int(passed) % 60:02d}  {stage:<15}{name or group:<16}{words}"
        print(text.rstrip(), file=sys.stderr, flush=True)
        self._said_at = time.monotonic()
