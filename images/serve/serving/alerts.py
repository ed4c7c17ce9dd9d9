"""One sink for what a person should know, with two levels.

    suspicious   a line in the log, a row for the board
    dangerous    the same, and a webhook (REFIT_ALERT_WEBHOOK), tried again until it was taken

Raising an alert only puts it in a queue: whoever raises one is about to take a model back, and must not wait.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

import httpx
from psycopg.types.json import Jsonb

from refit import log
from refit.errors import ServerUnavailable
from refit.sql import query
from serving.database import Database

WAITING = 1_000
WEBHOOK_SECONDS = 5.0
WEBHOOK_TRIES = 300


@dataclass(frozen=True)
class Alert:
    """One alert. The same `key` is one alert, however often it is raised."""

    level: str
    source: str
    message: str
    pipeline: str | None = None
    details: dict[str, Any] = field(default_factory=dict)
    key: str = ""
    at: float = 0.0
    notified_at: float | None = None
    tries: int = 0


class Alerts:
    """The sink. At most `WAITING` alerts wait for the database or the webhook; the oldest go first."""

    def __init__(self, database: Database, webhook: str | None) -> None:
        self._database = database
        self._webhook = webhook
        self._unsent: deque[Alert] = deque(maxlen=WAITING)
        self._unsaid: deque[Alert] = deque(maxlen=WAITING)
        self._seen: deque[str] = deque(maxlen=WAITING)
        self._wake = threading.Event()

    def suspicious(self, source: str, message: str, **more: Any) -> None:
        """Something that may be nothing."""
        self._raise(Alert("suspicious", source, message, **more))

    def dangerous(self, source: str, message: str, **more: Any) -> None:
        """Something that a person must know of now."""
        self._raise(Alert("dangerous", source, message, **more))

    def _raise(self, alert: Alert) -> None:
        alert = replace(alert, key=alert.key or uuid4().hex, at=time.time())
        if alert.key in self._seen:
            return
        self._seen.append(alert.key)
        log.event("alert", level=alert.level, source=alert.source, pipeline=alert.pipeline or "", message=alert.message)
        self._unsent.append(alert)
        if alert.level == "dangerous" and self._webhook:
            self._unsaid.append(alert)
        self._wake.set()

    def run(self, stop: threading.Event) -> None:
        """Deliver until told to stop."""
        while not stop.is_set():
            self._wake.wait(2.0)
            self._wake.clear()
            self.deliver()

    def deliver(self) -> None:
        """One try to say and to write down what waits."""
        for _ in range(len(self._unsaid)):
            alert = self._unsaid.popleft()
            if self._say(alert):
                self._unsent.append(replace(alert, notified_at=time.time()))
            elif alert.tries + 1 < WEBHOOK_TRIES:
                self._unsaid.append(replace(alert, tries=alert.tries + 1))
            else:
                log.event("alert", level="undelivered", message=alert.message)
        while self._unsent:
            try:
                self._write(self._unsent[0])
            except ServerUnavailable:
                return
            self._unsent.popleft()

    def _say(self, alert: Alert) -> bool:
        body = {"level": alert.level, "source": alert.source, "pipeline": alert.pipeline, "text": alert.message,
                "details": alert.details, "at": alert.at}  # fmt: skip
        try:
            answer = httpx.post(str(self._webhook), json=body, timeout=WEBHOOK_SECONDS)
        except httpx.HTTPError:
            return False
        return answer.is_success

    def _write(self, alert: Alert) -> None:
        row = {
            "level": alert.level, "source": alert.source, "pipeline": alert.pipeline, "message": alert.message,
            "details": Jsonb(alert.details), "key": alert.key, "at": alert.at, "notified_at": alert.notified_at,
        }  # fmt: skip
        with self._database.transaction() as connection:
            connection.execute(query("add_alert").encode(), row)
