"""Airflow's REST API, as far as the `refit` command needs it. Its command line costs ten CPU seconds a call."""

from __future__ import annotations

import json
import os
from typing import Any
from urllib.parse import quote

import httpx

from refit.errors import BadInput, ServerUnavailable
from standalone.home import Home
from standalone.ports import HOST, Ports
from standalone.record import Record

USER = "admin"


class Airflow:
    """The API server of the stack that runs in a home; without one, that of REFIT_AIRFLOW_URL."""

    def __init__(self, home: Home) -> None:
        record = Record.read(home)
        given = os.environ.get("REFIT_AIRFLOW_URL")
        ports = record.ports if record else Ports.from_environment()
        self.url = given if given and record is None else f"http://{HOST}:{ports.airflow}"
        self._home = home
        self._client = httpx.Client(base_url=self.url, timeout=60, trust_env=False)
        self._token: str | None = None

    def __enter__(self) -> Airflow:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def token(self) -> str:
        """A bearer token of the administrator."""
        if self._token is None:
            try:
                password = json.loads(self._home.airflow_passwords.read_text())[USER]
            except (OSError, KeyError, ValueError) as error:
                raise BadInput(
                    f"{self._home.airflow_passwords}: no password of Airflow's {USER}; `make up` makes it."
                ) from error
            answer = self._send("POST", "/auth/token", json={"username": USER, "password": password})
            self._token = str(answer.json()["access_token"])
        return self._token

    def knows(self, dag_id: str) -> bool:
        """Whether Airflow has read the DAG yet."""
        answer = self.ask("GET", "/api/v2/dags", params={"dag_id_pattern": dag_id, "limit": 100})
        return any(dag["dag_id"] == dag_id for dag in answer["dags"])

    def unpause(self, dag_id: str) -> None:
        """Let a DAG run; BadInput where there is none of that name."""
        self.ask(
            "PATCH", f"/api/v2/dags/{quote(dag_id)}", json={"is_paused": False}, params={"update_mask": "is_paused"}
        )

    def trigger(self, dag_id: str, conf: dict[str, Any]) -> str:
        """Start a run, as the form would; returns its id. What the form's schema refuses is BadInput."""
        body = {"logical_date": None, "conf": conf}
        return str(self.ask("POST", f"/api/v2/dags/{quote(dag_id)}/dagRuns", json=body)["dag_run_id"])

    def run(self, dag_id: str, run_id: str) -> dict[str, Any]:
        """A run: its state, its start and end."""
        return self.ask("GET", f"/api/v2/dags/{quote(dag_id)}/dagRuns/{quote(run_id)}")

    def runs(self, dag_id: str, limit: int = 5) -> list[dict[str, Any]]:
        """The newest runs of a DAG, the newest first."""
        answer = self.ask(
            "GET", f"/api/v2/dags/{quote(dag_id)}/dagRuns", params={"order_by": "-run_after", "limit": limit}
        )
        return list(answer["dag_runs"])

    def tasks(self, dag_id: str, run_id: str) -> list[dict[str, Any]]:
        """The task instances of a run."""
        path = f"/api/v2/dags/{quote(dag_id)}/dagRuns/{quote(run_id)}/taskInstances"
        return list(self.ask("GET", path, params={"limit": 200})["task_instances"])

    def log(self, dag_id: str, run_id: str, task_id: str, try_number: int) -> list[str]:
        """The lines of a task's try."""
        path = f"/api/v2/dags/{quote(dag_id)}/dagRuns/{quote(run_id)}/taskInstances/{quote(task_id)}/logs/{try_number}"
        content = self.ask("GET", path, params={"full_content": True}).get("content") or []
        return [str(line.get("event", line)) if isinstance(line, dict) else str(line) for line in content]

    def ask(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        """Any endpoint, by its path; what it answers, {} where it says nothing."""
        answer = self._send(method, path, headers={"authorization": f"Bearer {self.token()}"}, **more)
        return dict(answer.json()) if answer.content else {}

    def _send(self, method: str, path: str, **more: Any) -> httpx.Response:
        try:
            answer = self._client.request(method, path, **more)
        except httpx.TransportError as error:
            raise ServerUnavailable(f"Airflow does not answer at {self.url} ({error}); `make up` starts it.") from error
        if answer.status_code >= 500:
            raise ServerUnavailable(f"Airflow: {method} {path}: {answer.status_code}: {answer.text[:300]}")
        if answer.is_error:
            raise BadInput(_words(answer))
        return answer


def _words(answer: httpx.Response) -> str:
    try:
        detail = answer.json().get("detail", answer.text)
    except ValueError:
        detail = answer.text
    return detail if isinstance(detail, str) else json.dumps(detail)
