"""Who is champion of a line: the first one, the one before, and the change from one to the other.

A champion to be is remembered in the route table (`pending`) until its server answers; then the route changes, is read
back, and the change is written down. The history is append-only.
"""

from __future__ import annotations

import time
from uuid import uuid4

from refit import log
from refit.release import Release
from serving.alerts import Alerts
from serving.fleet import Fleet, ServerState
from serving.journal import Change, Journal
from serving.lines import Lines
from serving.rollout import Refused
from serving.table import Line, Pending, Target

LEFT_SECONDS = 60.0
"""How long a model that was taken back keeps its server, for those who look into it."""


class Champions:
    """Champions of all lines. Not for two threads at once: the controller holds its lock around every call."""

    def __init__(self, lines: Lines, fleet: Fleet, journal: Journal, alerts: Alerts) -> None:
        self._lines, self._fleet, self._journal, self._alerts = lines, fleet, journal, alerts
        self.changes = journal.changes()

    def first(self, pipeline: str, release: Release, actor: str) -> None:
        """Make a release the champion of a line that has none; its server is started first, in the background.

        Raises:
            Refused: another one is there.
        """
        line = self._lines.line(pipeline)
        there = line.champion.release if line.champion else line.pending.release if line.pending else None
        if there is None:
            self._fleet.want(release)
            pending = Pending(release=release, reason="first champion", actor=actor)
            self._lines.remember(line.model_copy(update={"pending": pending}))
        elif there.id != release.id:
            raise Refused(f"{pipeline} has a champion already: release {there.id}")

    def go_back(self, pipeline: str, reason: str, actor: str, to: str | None = None) -> None:
        """Make the previous champion the champion again, or an earlier one by its id; at once where it is still warm.

        Raises:
            Refused: there is none to go back to.
        """
        line = self._lines.line(pipeline)
        if line.pending is not None and line.champion is not None:
            return  # on its way already
        target = line.previous if to is None else self._earlier(pipeline, to)
        if target is None:
            raise Refused(f"{pipeline} has no previous champion to go back to")
        if line.champion is not None and line.champion.release.id == target.id:
            return
        self._fleet.want(target)
        pending = Pending(release=target, reason=f"rollback: {reason}", actor=actor)
        self._lines.remember(line.model_copy(update={"pending": pending}))
        message = f"{pipeline} goes back to its earlier champion {target.id}: {reason}"
        self._alerts.dangerous("controller", message, pipeline=pipeline)
        self.install(pipeline)

    def _earlier(self, pipeline: str, release: str) -> Release:
        for change in reversed(self.changes):
            if change.pipeline == pipeline and change.champion.id == release:
                return change.champion
        raise Refused(f"release {release} was never champion of {pipeline}")

    def install(self, pipeline: str) -> None:
        """Make a champion to be the champion, once its server answers."""
        line = self._lines.line(pipeline)
        if line.pending is None:
            return
        pending, health = line.pending, self._fleet.health(line.pending.release.id)
        if health.state is ServerState.STOPPED:
            self._fleet.want(pending.release)
        elif health.state is ServerState.FAILED:
            message = f"{pipeline}: {pending.reason}: release {pending.release.id} cannot be served: {health.why}"
            self._alerts.dangerous("controller", message, pipeline=pipeline)
            self._lines.remember(line.model_copy(update={"pending": None}))
        elif health.state is ServerState.READY:
            self._install(line, pending, health.url)

    def _install(self, line: Line, pending: Pending, url: str) -> None:
        old = line.champion.release if line.champion else None
        target = Target(release=pending.release, url=url)
        new = {"champion": target, "previous": old, "standby": None, "pending": None}
        self._lines.apply(line.model_copy(update=new))
        self._fleet.want(pending.release)  # it may have been about to end
        if old is not None:
            self._fleet.retire(old.id, LEFT_SECONDS)
        self.write_down(line.pipeline, pending.release, old, pending.reason, pending.actor)

    def retire_standby(self, pipeline: str) -> None:
        """Take a former champion off the routes when its time has come; its server ends a little later."""
        line = self._lines.line(pipeline)
        if line.standby is not None and self._fleet.due(line.standby.release.id):
            self._lines.apply(line.model_copy(update={"standby": None}))

    def write_down(
        self, pipeline: str, champion: Release, previous: Release | None, reason: str, actor: str,
        rollout: str | None = None,
    ) -> None:  # fmt: skip
        """Append a change to the history; that of a rollout once only."""
        key = f"finish-{rollout}" if rollout else uuid4().hex
        if any(known.key == key for known in self.changes):
            return
        change = Change(
            key=key, pipeline=pipeline, champion=champion, previous=previous, rollout=rollout, reason=reason,
            actor=actor, at=time.time(),
        )  # fmt: skip
        self._journal.change(change)
        self.changes.append(change)
        log.event("champion", pipeline=pipeline, release=champion.id, reason=reason, actor=actor)

    def recover(self, finishing: set[str]) -> None:
        """After a start: a champion in force that the history does not know was cut short in being written down.

        Args:
            finishing: pipelines whose rollout will write its own line.
        """
        newest = {change.pipeline: change.champion.id for change in self.changes}
        for line in self._lines.table.lines.values():
            champion = line.champion
            if champion and line.pipeline not in finishing and newest.get(line.pipeline) != champion.release.id:
                why = "in force when the controller started"
                self.write_down(line.pipeline, champion.release, line.previous, why, "controller")
