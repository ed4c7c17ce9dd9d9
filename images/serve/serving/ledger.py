"""The controller's dealings with Postgres, away from everything that must not wait: lead, measure, write history down.

One thread, two connections. Leading is an advisory lock held by one of them: whoever loses the connection has lost it.
What the journals say and the database does not is written again and again until it is there; keys make that harmless.
"""

from __future__ import annotations

import threading
import time

from psycopg.types.json import Jsonb

from refit import log
from refit.errors import ServerUnavailable
from refit.release import Release
from refit.sql import query
from serving.controller import Controller
from serving.database import Connection, Database
from serving.journal import Journal
from serving.measure import measure
from serving.rollout import Entry, Rollout

LOCK = 0x5EF172
"""The advisory lock's number: one controller leads a database."""
PAUSE_SECONDS = 1.0


class Ledger:
    """Between a controller and its database."""

    def __init__(self, controller: Controller, journal: Journal, leader: Database, database: Database) -> None:
        self._controller, self._journal = controller, journal
        self._leader, self._database = leader, database
        self._told: dict[str, int] = {}
        self._changes = 0
        self._holds = False

    def run(self, stop: threading.Event) -> None:
        """Work until told to stop."""
        while not stop.is_set():
            self.step()
            stop.wait(PAUSE_SECONDS)
        self._leader.close()
        self._database.close()

    def step(self) -> None:
        """One round; a database that is away costs the lead, and nothing else."""
        try:
            self._controller.leading = self._lead()
            self._measure()
            self._write()
        except ServerUnavailable as error:
            if self._controller.leading or self._holds:
                log.event("controller", state="leads no more", why=str(error))
            self._controller.leading = self._holds = False
            self._told.clear()  # the database may be another one when it comes back (a restore): ask it what it has
            self._changes = 0

    def _lead(self) -> bool:
        with self._leader.transaction() as connection:
            if self._holds and self._leader.marked():
                connection.execute("SELECT 1")
                return True
            row = connection.execute(query("try_lead").encode(), {"key": LOCK}).fetchone()
        self._holds = bool(row and row["leads"])
        if self._holds:
            self._leader.mark()
            log.event("controller", state="leads")
        return self._holds

    def _measure(self) -> None:
        for rollout in self._controller.rollouts().values():
            if not rollout.running or rollout.entered_at is None:
                continue
            started = time.monotonic()
            with self._database.transaction() as connection:
                stale = rollout.plan.policy.stale_seconds
                found = measure(connection, rollout.plan.id, rollout.step, rollout.share, stale)
            self._controller.measured(rollout.plan.id, rollout.step, found)
            if time.monotonic() - started > 3.0:
                log.event("controller", state="measuring is slow", seconds=time.monotonic() - started)

    # ----------------------------------------------------------------------------------------------------- history

    def _write(self) -> None:
        for rollout in self._controller.rollouts().values():
            if self._told.get(rollout.plan.id) != rollout.sequence:
                self._write_rollout(rollout)
        changes = self._controller.changes()
        for change in changes[self._changes :]:
            with self._database.transaction() as connection:
                for release in (change.champion, change.previous):
                    _add_release(connection, release)
                row = change.model_dump(exclude={"champion", "previous"})
                row |= {"champion": change.champion.id, "previous": change.previous.id if change.previous else None}
                connection.execute(query("add_champion").encode(), row)
            self._changes += 1

    def _write_rollout(self, rollout: Rollout) -> None:
        plan = rollout.plan
        with self._database.transaction() as connection:
            told = self._told.get(plan.id)
            if told is None:
                row = connection.execute(query("journal_written").encode(), {"rollout": plan.id}).fetchone()
                told = int(row["sequence"]) if row else 0
            for release in (plan.candidate, plan.champion):
                _add_release(connection, release)
            connection.execute(query("put_rollout").encode(), _rollout_row(rollout))
            for entry in self._journal.entries(plan.id):
                if told < entry.sequence <= rollout.sequence:
                    connection.execute(query("add_journal").encode(), _journal_row(plan.id, entry))
        self._told[plan.id] = rollout.sequence


def _add_release(connection: Connection, release: Release | None) -> None:
    if release is not None:
        connection.execute(query("add_team").encode(), {"team": release.team})
        row = release.model_dump() | {"profile": Jsonb(release.profile.model_dump(mode="json"))}
        connection.execute(query("add_release").encode(), row)


def _rollout_row(rollout: Rollout) -> dict[str, object]:
    plan = rollout.plan
    return {
        "id": plan.id, "pipeline": plan.pipeline, "candidate": plan.candidate.id, "champion": plan.champion.id,
        "run_id": plan.run_id, "policy": Jsonb({**plan.policy.model_dump(mode="json"), "steps": list(plan.steps)}),
        "state": str(rollout.state), "step": rollout.step, "weight": rollout.weight,
        "started_at": rollout.started_at, "ended_at": rollout.ended_at,
    }  # fmt: skip


def _journal_row(rollout: str, entry: Entry) -> dict[str, object]:
    return entry.model_dump(mode="json") | {"rollout": rollout, "measured": Jsonb(entry.measured)}
