"""The rollout controller's API, as methods: it is the sole writer of routes, everybody else asks it.

Every call is idempotent there, so a call that got no answer is made again: a few times, then `ServerUnavailable`.
Triggers use the same client from a thread; a look takes milliseconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import httpx

from refit.errors import BadInput, ServerUnavailable
from refit.release import Release
from refit.spec import Rollout

ATTEMPTS = 5
FIRST_PAUSE = 0.5
"""Seconds before the second attempt; doubled each time: some eight seconds in all."""

TIMEOUT = httpx.Timeout(30.0, connect=3.0)
_AWAY = frozenset({502, 503, 504})


class Refused(BadInput):
    """The controller understood and said no; `status` is HTTP's, the message its own words."""

    not_there: ClassVar[int] = 404
    conflict: ClassVar[int] = 409

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class Controller:
    """A client of the controller that REFIT_CONTROLLER_URL names; the token is read from REFIT_TOKEN_FILE."""

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
        attempts: int = ATTEMPTS,
    ) -> None:
        self._url = url or os.environ.get("REFIT_CONTROLLER_URL") or ""
        if not self._url:
            raise BadInput("REFIT_CONTROLLER_URL is not set: it names the rollout controller.")
        self._token = token
        self._transport = transport
        self._sleep = sleep
        self._attempts = attempts

    def pipeline(self, name: str) -> dict[str, Any]:
        """What serves a line: champion, previous, challenger, weight, rollout."""
        return self._ask("GET", f"/v1/pipelines/{name}")

    def champion(self, name: str) -> Release | None:
        """The release that a line's users get; None before the first."""
        found = self.pipeline(name).get("champion")
        return Release.model_validate(found) if found else None

    def set_first_champion(self, release: Release) -> dict[str, Any]:
        """Make a release the champion of a line that has none (`Refused`, 409, where another is there)."""
        return self._ask("PUT", f"/v1/pipelines/{release.pipeline}/champion", {"release": _plain(release)})

    def start_server(self, release: Release) -> dict[str, Any]:
        """Start, or adopt, the model server of a release: {"release_id", "state", "url", "why"}."""
        return self._ask("PUT", f"/v1/servers/{release.id}", {"release": _plain(release)})

    def server(self, release_id: str) -> dict[str, Any]:
        """Where a model server stands: starting, ready, failed or stopped."""
        return self._ask("GET", f"/v1/servers/{release_id}")

    def stop_server(self, release_id: str) -> bool:
        """Stop a model server; False when users are routed to it (it stays), or none is there."""
        try:
            self._ask("DELETE", f"/v1/servers/{release_id}")
        except Refused as error:
            if error.status in (Refused.conflict, Refused.not_there):
                return False
            raise
        return True

    def start_rollout(self, rollout_id: str, release: Release, policy: Rollout, run_id: str) -> dict[str, Any]:
        """Register a rollout: shadow (step 0), then the policy's shares."""
        return self._ask("POST", "/v1/rollouts", {
            "id": rollout_id, "pipeline": release.pipeline, "release": _plain(release), "steps": [0, *policy.steps],
            "policy": policy.model_dump(mode="json"), "run_id": run_id,
        })  # fmt: skip

    def rollout(self, rollout_id: str) -> dict[str, Any]:
        """Where a rollout stands: state, step, weight, verdict, why, journal."""
        return self._ask("GET", f"/v1/rollouts/{rollout_id}")

    def enter_step(self, rollout_id: str, step: int) -> dict[str, Any]:
        """Enter a step; the one before must have passed."""
        return self._ask("POST", f"/v1/rollouts/{rollout_id}/steps/{step}")

    def finish_rollout(self, rollout_id: str) -> dict[str, Any]:
        """The candidate becomes the champion, the champion the previous one."""
        return self._ask("POST", f"/v1/rollouts/{rollout_id}/finish")

    def roll_back(self, pipeline: str, reason: str) -> dict[str, Any]:
        """Take a running rollout back, or, without one, put the previous champion back."""
        return self._ask("POST", f"/v1/pipelines/{pipeline}/rollback", {"reason": reason})

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        why = ""
        for attempt in range(self._attempts):
            if attempt:
                self._sleep(FIRST_PAUSE * 2 ** (attempt - 1))
            try:
                answer = self._send(method, path, body)
            except httpx.TransportError as error:
                why = f"{type(error).__name__}: {error}"
                continue
            if answer.status_code in _AWAY:
                why = f"{answer.status_code}: {_words(answer)}"
                continue
            if answer.status_code >= 500:
                raise ServerUnavailable(f"controller: {method} {path}: {answer.status_code}: {_words(answer)}")
            if answer.is_error:
                raise Refused(f"controller: {method} {path}: {_words(answer)}", answer.status_code)
            return dict(answer.json()) if answer.content else {}
        raise ServerUnavailable(f"controller: {method} {self._url}{path}: no answer: {why}")

    def _send(self, method: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
        headers = {"authorization": f"Bearer {self._token or _token()}"}
        with httpx.Client(base_url=self._url, timeout=TIMEOUT, transport=self._transport, trust_env=False) as client:
            return client.request(method, path, json=body, headers=headers)


def _token() -> str:
    path = os.environ.get("REFIT_TOKEN_FILE")
    if not path:
        raise BadInput("REFIT_TOKEN_FILE is not set: it names the file with the controller's token.")
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise BadInput(f"{path}: the controller's token cannot be read: {error}") from error


def _plain(release: Release) -> dict[str, Any]:
    return release.model_dump(mode="json")


def _words(answer: httpx.Response) -> str:
    try:
        document = answer.json()
    except ValueError:
        return answer.text[:300]
    return str(document.get("detail", document)) if isinstance(document, dict) else str(document)
