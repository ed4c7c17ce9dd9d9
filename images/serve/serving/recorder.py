"""The recorder: what users met and what they said of it, from files on this disk into Postgres.

    spool/access.jsonl (Envoy)            → exposures       one row a request; users as salted hashes
    spool/answers-<release>.jsonl (vLLM)  → shadow_pairs    champion's and candidate's answer to the same request
    spool/feedback.jsonl (POST)           → feedback

The files are the buffer: while Postgres is away they grow and nothing is lost; a kill at any moment repeats lines,
which their keys make harmless. Files that were read are rotated and removed, and with them the users' ids.

What it does not do: judge (the controller does), or stand in a request's way (Envoy and vLLM only write files).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg

from refit import log
from refit.errors import ServerUnavailable
from refit.sql import query
from serving import exposures, feedback
from serving.bootstrap import ACCESS_LOG
from serving.database import Database
from serving.exposures import Pairs
from serving.feedback import FeedbackSpool
from serving.gateway import Gateway
from serving.tail import Tail

PAUSE_SECONDS = 0.5
ROTATE_BYTES = 32 << 20
SETTLED_SECONDS = 30.0
"""Envoy may still write into a file that was renamed under it; after this long it does not."""


class Recorder:
    """The loop between the files and the database."""

    def __init__(self, home: Path, database: Database, gateway: Gateway) -> None:
        self._spool = home / "spool"
        self._spool.mkdir(parents=True, exist_ok=True)
        self._database = database
        self._gateway = gateway
        self._salt = exposures.user_salt(home)
        self._pairs = Pairs()
        self._tails: dict[Path, Tail] = {}
        self._unsent: dict[Path, tuple[int, list[dict[str, Any]]]] = {}
        self._away = False
        self.feedback = FeedbackSpool(self._spool / "feedback.jsonl")

    def run(self, stop: threading.Event) -> None:
        """Work until told to stop."""
        while not stop.is_set():
            moved = self.step()
            stop.wait(0.0 if moved else PAUSE_SECONDS)

    def step(self) -> int:
        """Move what there is; returns the number of lines. Never raises for a database or a gateway that is away."""
        try:
            moved = self._move(self._spool / ACCESS_LOG, "add_exposures", self._exposures)
            moved += self._move(self.feedback.path, "add_feedback", feedback.rows)
            for path in sorted(self._spool.glob("answers-*.jsonl")):
                moved += self._move(path, "add_shadow_pairs", self._pairs.add)
        except ServerUnavailable as error:
            if not self._away:
                log.event("recorder", state="waiting", why=str(error))
            self._away = True
            return 0
        if self._away:
            log.event("recorder", state="recording again")
        self._away = False
        self._tidy()
        return moved

    def _exposures(self, lines: list[bytes]) -> list[dict[str, Any]]:
        return [row for line in lines if (row := exposures.exposure(line, self._salt)) is not None]

    def _move(self, path: Path, name: str, rows_of: Callable[[list[bytes]], list[dict[str, Any]]]) -> int:
        tail = self._tails.setdefault(path, Tail(path, self._spool / f".{path.name}.offset"))
        if path not in self._unsent:
            lines = tail.read()
            if not lines:
                return 0
            self._unsent[path] = (
                len(lines),
                rows_of(lines),
            )  # once: a pair that was put together is taken apart nowhere
        count, rows = self._unsent[path]
        if rows:
            self._insert(name, rows)
        tail.commit()
        del self._unsent[path]
        return count

    def _insert(self, name: str, rows: list[dict[str, Any]]) -> None:
        try:
            with self._database.transaction() as connection:
                connection.cursor().executemany(query(name), rows)
        except psycopg.DataError:
            # One line with a value that no column takes must not stop all others: each for itself, the bad ones named.
            for row in rows:
                try:
                    with self._database.transaction() as connection:
                        connection.execute(query(name), row)
                except psycopg.DataError as error:
                    log.event("recorder", state="dropped a row", why=str(error).splitlines()[0])

    def _tidy(self) -> None:
        access = self._spool / ACCESS_LOG
        for path, tail in self._tails.items():
            rotated = path.with_name(path.name + ".1")
            with suppress(FileNotFoundError):
                settled = time.time() - rotated.stat().st_mtime > SETTLED_SECONDS
                if settled and tail.finished(rotated):
                    rotated.unlink()
        self.feedback.rotate()
        with suppress(FileNotFoundError, ServerUnavailable):
            rotated = access.with_name(access.name + ".1")
            if access.stat().st_size > ROTATE_BYTES and not rotated.exists():
                os.replace(access, rotated)
                self._gateway.reopen_log()
