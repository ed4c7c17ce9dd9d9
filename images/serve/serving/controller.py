"""The rollout controller: the one writer of routes, and the one who takes a harmful model back.

It looks once a second, whoever else is up. What must survive a kill is on this disk before or after traffic moves:

    enter a step    journal "entering" → routes, read back → journal "entered"
    finish          journal "finishing" → routes, read back → champions → journal "finished"
    roll back       routes (weight 0), read back → journal "rolled_back"        never waits for Postgres

So a controller that starts finds, in the route table and the journals, either a step to do again or a rollback to write
down. Without Postgres it keeps people safe and goes back; it does not go forward (`leading` is False).

What it does not do: decide when to go on. The DAG asks for the next step, and gets it only after a pass.
Known race: a candidate that turns harmful between two looks is seen a second later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

from refit import log
from refit.errors import RefitError, ServerUnavailable
from refit.release import Release
from serving.alerts import Alerts
from serving.champions import LEFT_SECONDS, Champions
from serving.fleet import Fleet, ServerState
from serving.journal import Change, Journal
from serving.lines import Lines
from serving.rollout import Action, Entry, Plan, Refused, Rollout, apply
from serving.table import Table, Target
from serving.verdicts import Judgement, Measured, Verdict, in_time, judge

LOOK_SECONDS = 1.0
FRESH_SECONDS = 15.0
"""A measurement older than this is none."""
WRITTEN_EVERY_SECONDS = 30.0
"""How often a verdict of wait is written down."""
RESTARTS = 3


class Controller:
    """The state of all lines, and every change of it."""

    def __init__(self, lines: Lines, fleet: Fleet, journal: Journal, alerts: Alerts) -> None:
        self._lines, self._fleet, self._journal, self._alerts = lines, fleet, journal, alerts
        self._champions = Champions(lines, fleet, journal, alerts)
        self._lock = threading.RLock()
        self._rollouts = journal.rollouts()
        self._withdrawing: dict[str, Judgement] = {}
        self._looks: dict[str, tuple[int, float, Measured | None]] = {}
        self._judgements: dict[str, Judgement] = {}
        self._written: dict[str, float] = {}
        self._restarts: dict[str, int] = {}
        self.leading = False
        self._recover()

    # --------------------------------------------------------------------------------------------------- questions

    def table(self) -> Table:
        """The route table, as it is meant to be."""
        return self._lines.table

    def needed(self) -> set[str]:
        """Releases whose servers must not end: those on the routes, and candidates on their way there."""
        return self.table().releases() | {r.plan.candidate.id for r in self.rollouts().values() if r.running}

    def rollouts(self) -> dict[str, Rollout]:
        """Every rollout, by id, oldest first."""
        with self._lock:
            return dict(self._rollouts)

    def changes(self) -> list[Change]:
        """Every change of a champion."""
        with self._lock:
            return list(self._champions.changes)

    def running(self, pipeline: str) -> Rollout | None:
        """The rollout that runs on a line."""
        return next((r for r in self.rollouts().values() if r.running and r.plan.pipeline == pipeline), None)

    def judgement(self, rollout: Rollout) -> Judgement:
        """The newest verdict on a rollout; a pass of the current step stands."""
        found = self._judgements.get(rollout.plan.id)
        if found is None or rollout.passed or not rollout.running:
            return Judgement(rollout.verdict, rollout.why, found.measured if found else {})
        return found

    def live(self) -> bool:
        """Whether Envoy was seen to follow the table as it is now."""
        return self._lines.live

    # --------------------------------------------------------------------------------------------------- requests

    def first_champion(self, pipeline: str, release: Release, actor: str) -> None:
        """Make a release the champion of a line that has none."""
        with self._lock:
            self._must_lead()
            self._champions.first(pipeline, release, actor)

    def start(self, plan: Plan) -> Rollout:
        """Begin a rollout at its shadow step; the same plan again is answered with the rollout as it is."""
        with self._lock:
            known = self._rollouts.get(plan.id)
            if known is not None:
                if known.plan.candidate.id != plan.candidate.id or known.plan.pipeline != plan.pipeline:
                    raise Refused(f"rollout {plan.id} is another one: of release {known.plan.candidate.id}")
                return known
            self._must_lead()
            line, other = self._lines.line(plan.pipeline), self.running(plan.pipeline)
            if other is not None:
                raise Refused(f"{plan.pipeline} has a running rollout: {other.plan.id}, step {other.step}")
            if line.pending is not None:
                raise Refused(f"{plan.pipeline} is changing its champion ({line.pending.reason}); wait for it")
            if line.champion is None or line.champion.release.id != plan.champion.id:
                raise Refused(f"the champion of {plan.pipeline} has changed; plan the rollout anew")
            if plan.candidate.id == plan.champion.id:
                raise Refused(f"release {plan.candidate.id} is the champion of {plan.pipeline} already")
            self._fleet.want(plan.candidate)
            self._journal.start(plan)
            self._rollouts[plan.id] = Rollout(plan)
            self._write_down(plan.id, Action.STARTED, f"release {plan.candidate.id} against {plan.champion.id}")
            self._write_down(plan.id, Action.ENTERING, "shadow", step=0)
            self._settle(plan.id)
            return self._rollouts[plan.id]

    def enter(self, rollout: str, step: int) -> Rollout:
        """Go to the next step, which the verdict on the current one must allow; the current step again is no change."""
        with self._lock:
            found = self._known(rollout)
            if found.may_enter(step):
                self._must_lead()
                if rollout in self._withdrawing:
                    raise Refused(f"rollout {rollout} is being taken back: {self._withdrawing[rollout].why}")
                self._judgements.pop(rollout, None)
                self._write_down(rollout, Action.ENTERING, f"{found.plan.steps[step]} % of users", step=step)
                self._settle(rollout)
            return self._rollouts[rollout]

    def finish(self, rollout: str) -> Rollout:
        """The candidate becomes champion; the old one is kept warm, then retired."""
        with self._lock:
            found = self._known(rollout)
            if found.may_finish():
                self._must_lead()
                health = self._fleet.health(found.plan.candidate.id)
                if health.state is not ServerState.READY:
                    raise ServerUnavailable(f"the candidate's server is {health.state}: {health.why}; ask again")
                if not found.finishing:
                    self._write_down(rollout, Action.FINISHING, "the last step has passed")
                self._settle(rollout)
            return self._rollouts[rollout]

    def roll_back(self, pipeline: str, reason: str, actor: str, to: str | None = None) -> None:
        """Take the running rollout back; where none runs, make the previous champion (or `to`) the champion again."""
        with self._lock:
            rollout = self.running(pipeline)
            if rollout is not None and rollout.finishing:
                self._settle(rollout.plan.id)  # past the point of no return: it ends, and then the line goes back
            elif rollout is not None:
                self._withdraw(rollout.plan.id, Judgement(Verdict.FAIL, f"rolled back by {actor}: {reason}"))
                return
            self._champions.go_back(pipeline, reason, actor, to)

    def measured(self, rollout: str, step: int, found: Measured | None) -> None:
        """Take in a measurement of a step; None says that nothing could be measured."""
        with self._lock:
            self._looks[rollout] = (step, time.monotonic(), found)

    # ---------------------------------------------------------------------------------------------------- the look

    def run(self, stop: threading.Event) -> None:
        """Look until told to stop."""
        while not stop.is_set():
            self.look()
            stop.wait(LOOK_SECONDS)

    def look(self) -> None:
        """One look at everything; a line that cannot be helped now does not keep the others from it."""
        self._guarded(self._lines.follow)
        self._guarded(self._keep_serving)
        for rollout in [r for r in self.rollouts().values() if r.running]:
            self._guarded(partial(self._look_at, rollout.plan.id))
        for pipeline in self._lines.names():
            self._guarded(partial(self._champions.install, pipeline))
            self._guarded(partial(self._champions.retire_standby, pipeline))

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            with self._lock:
                work()
        except (RefitError, OSError) as error:
            log.event("controller", state="cannot now", why=str(error))

    def _keep_serving(self) -> None:
        """A release that the table names has a server, whatever became of its record."""
        missing = {target.release.id: target.release for line in self._lines.table.lines.values()
                   for target in (line.champion, line.challenger) if target}  # fmt: skip
        for release in missing.keys() - set(self._fleet.releases()):
            self._fleet.want(missing[release])

    def _look_at(self, rollout: str) -> None:
        if rollout in self._withdrawing:
            self._withdraw(rollout, self._withdrawing[rollout])
            return
        self._settle(rollout)
        found = self._rollouts[rollout]
        if not found.running or found.finishing:
            return
        health = self._fleet.health(found.plan.candidate.id)
        restarts = health.restarts - self._restarts.setdefault(rollout, health.restarts)
        if health.state is ServerState.FAILED or restarts >= RESTARTS:
            why = health.why or f"its server ended {restarts} times"
            self._withdraw(rollout, Judgement(Verdict.FAIL, f"the candidate cannot be served: {why}"))
            return
        if found.entered_at is None:
            self._judgements[rollout] = Judgement(Verdict.WAIT, f"the candidate's server is not ready: {health.why}")
            return
        seconds = time.time() - found.entered_at
        server = None if health.state is ServerState.READY else health.why or "starting"
        self._act(found, judge(found.plan.policy, found.share, self._look_of(found), server, seconds), seconds)

    def _look_of(self, rollout: Rollout) -> Measured | None:
        step, at, measured = self._looks.get(rollout.plan.id, (-1, 0.0, None))
        return measured if step == rollout.step and time.monotonic() - at < FRESH_SECONDS else None

    def _act(self, rollout: Rollout, judgement: Judgement, seconds: float) -> None:
        name, policy = rollout.plan.id, rollout.plan.policy
        if rollout.passed:
            # A passed step waits for whoever asks for the next one, and has no deadline; harm still ends it.
            if judgement.verdict is Verdict.FAIL:
                self._withdraw(name, judgement)
            elif seconds > 2 * policy.deadline_minutes * 60:
                message = f"rollout {name} has passed step {rollout.step} and nobody asks for the next"
                key = f"idle-{name}-{rollout.step}"
                self._alerts.suspicious("controller", message, pipeline=rollout.plan.pipeline, key=key)
            return
        judgement = in_time(policy, judgement, seconds)
        self._judgements[name] = judgement
        if judgement.verdict is Verdict.FAIL:
            self._withdraw(name, judgement)
        elif judgement.verdict is Verdict.PASS or time.time() - self._written.get(name, 0.0) > WRITTEN_EVERY_SECONDS:
            self._written[name] = time.time()
            self._write_down(name, Action.JUDGED, judgement.why, verdict=judgement.verdict, measured=judgement.measured)

    # ------------------------------------------------------------------------------------------------- the changes

    def _settle(self, rollout: str) -> None:
        """Bring traffic to where the journal says it should be."""
        found = self._rollouts[rollout]
        if found.finishing:
            self._complete(found)
        elif found.entered_at is None and rollout not in self._withdrawing:
            health = self._fleet.health(found.plan.candidate.id)
            if health.state is not ServerState.READY:
                return
            challenger = Target(release=found.plan.candidate, url=health.url)
            line = self._lines.line(found.plan.pipeline).model_copy(
                update={
                    "challenger": challenger, "rollout": rollout, "step": found.step, "weight": found.share,
                    "shadow": found.share == 0,
                }
            )  # fmt: skip
            self._lines.apply(line)
            self._write_down(rollout, Action.ENTERED, f"{found.share} % of users" if found.share else "shadow")

    def _complete(self, rollout: Rollout) -> None:
        plan = rollout.plan
        line = self._lines.line(plan.pipeline)
        if line.champion is None or line.champion.release.id != plan.candidate.id:
            assert line.challenger is not None
            warm = line.champion if plan.policy.keep_warm_minutes > 0 else None
            done = line.without_challenger().model_copy(
                update={"champion": line.challenger, "previous": plan.champion, "standby": warm}
            )
            self._lines.apply(done)
        elif not self._lines.live:
            self._lines.follow()
        self._fleet.want(plan.candidate)
        self._fleet.retire(plan.champion.id, plan.policy.keep_warm_minutes * 60)
        self._champions.write_down(
            plan.pipeline, plan.candidate, plan.champion, f"rollout {plan.id} ended well", "controller", rollout=plan.id
        )
        self._write_down(plan.id, Action.FINISHED, f"release {plan.candidate.id} is champion")

    def _withdraw(self, rollout: str, judgement: Judgement) -> None:
        """Weight 0 first, read back; then the journal, and everything that may wait."""
        found = self._rollouts[rollout]
        if rollout not in self._withdrawing:
            self._withdrawing[rollout] = judgement
            message = f"rollout {rollout} of {found.plan.pipeline} is taken back at step {found.step}: {judgement.why}"
            self._alerts.dangerous(
                "controller", message, pipeline=found.plan.pipeline, key=f"back-{rollout}", details=judgement.measured
            )
        line = self._lines.line(found.plan.pipeline)
        if line.rollout == rollout:
            self._lines.apply(line.without_challenger())
        elif not self._lines.live:
            self._lines.follow()
        try:
            self._write_down(
                rollout, Action.ROLLED_BACK, judgement.why, verdict=Verdict.FAIL, measured=judgement.measured
            )
        finally:
            del self._withdrawing[rollout]
            self._fleet.retire(found.plan.candidate.id, LEFT_SECONDS)

    # --------------------------------------------------------------------------------------------- the inner parts

    def _write_down(self, rollout: str, action: Action, why: str, **more: object) -> None:
        """Journal first, memory second. A full disk must not stop a rollback: it goes on in memory and is alerted."""
        found = self._rollouts[rollout]
        entry: Entry = found.entry(action, time.time(), why, **more)
        try:
            self._journal.add(rollout, entry)
        except OSError as error:
            if action is not Action.ROLLED_BACK:
                raise
            self._alerts.dangerous("controller", f"the journal of rollout {rollout} cannot be written: {error}")
        self._rollouts[rollout] = apply(found, entry)
        log.event("rollout", id=rollout, step=entry.step, weight=entry.weight, action=action, why=why)

    def _known(self, rollout: str) -> Rollout:
        try:
            return self._rollouts[rollout]
        except KeyError:
            raise LookupError(f"no rollout {rollout}") from None

    def _must_lead(self) -> None:
        if not self.leading:
            raise ServerUnavailable(
                "the controller does not lead (Postgres is away, or another leads): it only goes back"
            )

    def _recover(self) -> None:
        """After a start: what the table and the journals say together."""
        for name, rollout in list(self._rollouts.items()):
            line = self._lines.line(rollout.plan.pipeline)
            if not rollout.running or rollout.finishing:
                continue
            was_live = rollout.entered_at is not None or rollout.step > 0
            if was_live and line.rollout != name:
                # Written down by the first look, when Envoy has been read back.
                self._withdrawing[name] = Judgement(Verdict.FAIL, "taken back just before a restart")
        running = {name for name, rollout in self._rollouts.items() if rollout.running}
        for line in list(self._lines.table.lines.values()):
            if line.rollout and line.rollout not in running:
                log.event("controller", state="unknown rollout taken off the routes", rollout=line.rollout)
                self._lines.remember(line.without_challenger())
        self._champions.recover({r.plan.pipeline for r in self._rollouts.values() if r.running and r.finishing})
