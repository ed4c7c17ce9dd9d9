"""Model servers, through the rollout controller."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowSkipException

from operators import run
from operators.controller import Controller, Refused
from operators.errors import restore
from operators.triggers import ServerTrigger

if TYPE_CHECKING:
    from airflow.sdk import Context

START_MINUTES = 30.0
"""How long a model server may take to answer its first completion: a large model is read from a store first."""


class VllmOperator(BaseOperator):
    """Start the vLLM server of a release and wait, deferred, until it answers a real completion; or stop it.

    Starting is idempotent: a running server is adopted, so the champion's costs nothing. Stopping is safe: a server
    that users are routed to, or that is kept warm for a rollback, stays; the controller knows.

    What it does not do: route anybody. Batch inference through the server is `EvaluateOperator`.

    Args:
        release: URI of the release's document in the run's folder.
        action: start or stop.
        first_champion: make the release its line's champion too, which only works where there is none.
    """

    template_fields: Sequence[str] = ("release",)
    ui_color = "#eefaf0"

    def __init__(
        self,
        *,
        release: str,
        action: Literal["start", "stop"] = "start",
        first_champion: bool = False,
        minutes: float = START_MINUTES,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("pool", "serve")
        super().__init__(**kwargs)
        self.release = release
        self.action = action
        self.first_champion = first_champion
        self.minutes = minutes

    def execute(self, context: Context) -> str:
        if not self.release:
            raise AirflowSkipException("there is no release: the run ended before it made one")
        release = run.read_release(self.release)
        controller = Controller()
        if self.action == "stop":
            if _is_needed(controller, release.pipeline, release.id):
                self.log.info("%s stays: it serves users, or is kept for a rollback", release.id)
            elif controller.stop_server(release.id):
                self.log.info("%s is stopped", release.id)
            return release.id
        if self.first_champion:
            controller.set_first_champion(release)
        else:
            controller.start_server(release)
        self.defer(
            trigger=ServerTrigger(
                release_id=release.id, champion_of=release.pipeline if self.first_champion else None,
                deadline=time.time() + self.minutes * 60,
            ),
            method_name="conclude",
        )  # fmt: skip
        raise AssertionError("defer raises")

    def conclude(self, context: Context, event: dict[str, Any]) -> str:
        """After the wait: the release's id."""
        if event["status"] != "done":
            raise restore(event)
        self.log.info("%s answers at %s", event["release_id"], event["url"])
        return str(event["release_id"])


def _is_needed(controller: Controller, pipeline: str, release_id: str) -> bool:
    try:
        line = controller.pipeline(pipeline)
    except Refused as error:
        if error.status == Refused.not_there:
            return False
        raise
    rollout = line.get("rollout") or {}
    roles = ["champion", "previous", *(["challenger"] if rollout.get("state") == "running" else [])]
    return any((line.get(role) or {}).get("id") == release_id for role in roles)
