"""The rollout controller's API, as far as the `refit` command needs it."""

from __future__ import annotations

import os
from typing import Any

import httpx

from refit.errors import BadInput, ServerUnavailable
from standalone.home import Home
from standalone.ports import HOST, Ports
from standalone.record import Record


class Controller:
    """The controller of the stack that runs in a home; without one, that of REFIT_CONTROLLER_URL."""

    def __init__(self, home: Home) -> None:
        record = Record.read(home)
        ports = record.ports if record else Ports.from_environment()
        given = os.environ.get("REFIT_CONTROLLER_URL")
        self._url = given if given and record is None else f"http://{HOST}:{ports.controller}"
        self._home = home

    def line(self, pipeline: str) -> dict[str, Any]:
        """What serves a line, its running rollout, and its champions so far (`history`, the oldest first)."""
        return self._ask("GET", f"/v1/pipelines/{pipeline}")

    def rollout(self, rollout: str) -> dict[str, Any]:
        """A rollout with its journal."""
        return self._ask("GET", f"/v1/rollouts/{rollout}")

    def roll_back(self, pipeline: str, reason: str, to: str | None = None) -> dict[str, Any]:
        """Take the running rollout back; else go back to the previous champion, or to the earlier one named."""
        return self._ask("POST", f"/v1/pipelines/{pipeline}/rollback", {"reason": reason, "to": to})

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            answer = httpx.request(
                method, self._url + path, json=body, timeout=120, trust_env=False,
                headers={"authorization": f"Bearer {self._home.secret('token')}"},
            )  # fmt: skip
        except (httpx.TransportError, FileNotFoundError) as error:
            raise ServerUnavailable(
                f"the rollout controller does not answer ({error}); `make up` starts it."
            ) from error
        if answer.is_error:
            is_json = "json" in answer.headers.get("content-type", "")
            detail = answer.json().get("detail", answer.text) if is_json else answer.text
            raise (BadInput if answer.status_code < 500 else ServerUnavailable)(str(detail))
        return dict(answer.json())
