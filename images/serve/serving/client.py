"""The controller, asked from the command line."""

from __future__ import annotations

import time
from typing import Any

import httpx

from refit.errors import BadInput, ServerUnavailable
from serving.settings import Settings

WAIT_SECONDS = 900.0


class ControllerClient:
    """The few questions that a person asks."""

    def __init__(self, settings: Settings) -> None:
        headers = {"Authorization": f"Bearer {settings.token()}", "x-refit-actor": "command line"}
        self._client = httpx.Client(base_url=settings.controller, headers=headers, timeout=60.0, trust_env=False)

    def pipelines(self) -> list[dict[str, Any]]:
        """What serves on every line."""
        return list(self._ask("GET", "/v1/pipelines"))

    def servers(self) -> list[dict[str, Any]]:
        """Every model server."""
        return list(self._ask("GET", "/v1/servers"))

    def roll_back(self, pipeline: str, reason: str) -> dict[str, Any]:
        """Go back, and wait until the line serves what it goes back to."""
        line = self._ask("POST", f"/v1/pipelines/{pipeline}/rollback", json={"reason": reason})
        deadline = time.monotonic() + WAIT_SECONDS
        while line["pending"] or line["weight"] or not line["live"]:
            if time.monotonic() > deadline:
                raise ServerUnavailable(f"{pipeline} is still not back after {WAIT_SECONDS:.0f} s: {line['pending']}")
            time.sleep(1.0)
            line = self._ask("GET", f"/v1/pipelines/{pipeline}")
        return dict(line)

    def _ask(self, method: str, path: str, **more: Any) -> Any:
        try:
            answer = self._client.request(method, path, **more)
        except httpx.HTTPError as error:
            raise ServerUnavailable(
                f"the controller does not answer on {self._client.base_url}: {error}. Is the stack up (`refit status`)?"
            ) from error
        if answer.is_success:
            return answer.json()
        detail = (
            answer.json().get("detail", answer.text)
            if "json" in answer.headers.get("content-type", "")
            else answer.text
        )
        if answer.status_code >= 500:
            raise ServerUnavailable(str(detail))
        raise BadInput(str(detail))
