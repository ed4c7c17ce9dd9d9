"""What waits, deferred: for a job, a checkpoint, a model server, a verdict.

A trigger here is a look that is repeated: `look` runs in a thread (it reads a file or asks the controller), and answers
None for "not yet" or the event that ends the wait. All keep three rules:

- The deadline travels inside: Airflow's own time-out of a trigger would leave what it watches running.
- What is away for a while (the store, the controller) is waited for, `PATIENCE` seconds, not failed on.
- Only `on_kill`, which is a person's act, ends the thing outside; a triggerer that restarts finds it again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance
from airflow.triggers.base import BaseTrigger, TriggerEvent
from asgiref.sync import sync_to_async

from operators import backends, nodes, pods, projection, tracking
from operators.backends import Phase
from operators.controller import Controller
from operators.errors import Hung, NodeSlow, TimedOut, describe
from refit.errors import Infrastructure, NodeLost, RefitError, ServerUnavailable
from refit.job import EVENTS, Job, read_events
from refit.progress import Teller, duration, status_of
from refit.states import State
from refit.store import join, store_for

PATIENCE = 300.0
"""Seconds that the store or the controller may be away before a wait gives up."""

PROJECT_SECONDS = 10.0
"""How often a job's new events go to Postgres while it runs."""

GIVEN_UP = frozenset({"failed", "upstream_failed", "skipped", "removed"})
"""States of a task after which nothing of it will come."""

LINES = 200
"""At most this many of a job's lines go to the task's log at once; the rest follows at the next look."""


class Watch(BaseTrigger):
    """A look, repeated until it answers."""

    def __init__(self, *, deadline: float, poll_seconds: float = 2.0, **fields: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.deadline = deadline
        self.poll_seconds = poll_seconds
        self._fields = fields
        self._away_since: float | None = None

    def serialize(self) -> tuple[str, dict[str, Any]]:
        kind = type(self)
        fields = {"deadline": self.deadline, "poll_seconds": self.poll_seconds, **self._fields}
        return f"{kind.__module__}.{kind.__qualname__}", fields

    async def run(self) -> AsyncIterator[TriggerEvent]:
        # Not asyncio.to_thread: from a thread of this kind a look may ask Airflow too.
        look = sync_to_async(self.ask, thread_sensitive=False)
        while (event := await look()) is None:
            await asyncio.sleep(self.poll_seconds)
        yield TriggerEvent(event)  # type: ignore[no-untyped-call]

    def look(self) -> dict[str, Any] | None:
        """The event, or None when it is not time yet. May raise RefitError."""
        raise NotImplementedError

    def late(self) -> RefitError:
        """What to do, and to say, when the deadline has passed."""
        raise NotImplementedError

    def ask(self) -> dict[str, Any] | None:
        """Look once: the event, also where the look fails, or None when it is not time yet."""
        try:
            event = self.look()
            self._away_since = None
            if event is None and time.time() > self.deadline:
                return failed(self.late())
        except (Infrastructure, OSError) as error:
            since = self._away_since = self._away_since or time.monotonic()
            if time.monotonic() - since < PATIENCE:
                self.log.warning("away, asking again: %s", error)
                return None
            return failed(error if isinstance(error, RefitError) else ServerUnavailable(str(error)))
        except RefitError as error:
            return failed(error)
        return event


def done(**more: Any) -> dict[str, Any]:
    """The event of a wait that ended well."""
    return {"status": "done", **more}


def failed(error: RefitError) -> dict[str, Any]:
    """The event of a wait that did not."""
    return {"status": "failed", **describe(error)}


class JobTrigger(Watch):
    """Waits for a job's manifest, or for its end without one.

    Meanwhile it carries the job's lines and progress into the task's log, its events into Postgres, and a training's
    steps into MLflow.

    What it does not do: decide on a retry (the exception's class does). Known repetition: a triggerer that restarts
    shows the job's lines of this try once more.
    """

    def __init__(
        self,
        *,
        job: str,
        backend: str,
        run_id: str,
        heartbeat_timeout: float,
        cursor: str = "",
        since: float,
        **wait: Any,
    ) -> None:
        super().__init__(
            job=job,
            backend=backend,
            run_id=run_id,
            heartbeat_timeout=heartbeat_timeout,
            cursor=cursor,
            since=since,
            **wait,
        )
        self.job = job
        self.backend = backend
        self.run_id = run_id
        self.heartbeat_timeout = heartbeat_timeout
        self.cursor = cursor
        self.since = since
        self._document: Job | None = None
        self._curves: tracking.Follower | None = None
        self._teller = Teller()
        self._projected = (0.0, 0)

    def look(self) -> dict[str, Any] | None:
        job = self._document = self._document or Job.load(self.job)
        self._curves = self._curves or tracking.Follower(job)
        self._curves.carry()
        standing = backends.named(self.backend).state(job.output)
        self._carry_lines(job.output)
        # Asked after the standing: a job that ended well between the two questions has its manifest by now.
        if store_for(job.output).manifest(job.output) is not None:
            return done(output=job.output)
        if standing.fault is not None:
            return failed(standing.fault)
        if standing.phase is Phase.ENDED:
            return failed(Infrastructure(f"{job.id} ended with exit 0 and without a manifest"))
        if standing.phase is Phase.ABSENT:
            return failed(NodeLost(f"{job.id}: nothing runs it any more: {standing.why}"))
        now = time.time()
        status = status_of(job.output)
        if status is not None and (news := self._teller.news(status, now)):
            self.log.info("%s", news)
        if standing.phase is Phase.RUNNING and (silent := now - self._last_sign(status)) > self.heartbeat_timeout:
            return self._hung(job, silent)
        return self._carry_events(job, now)

    def ask(self) -> dict[str, Any] | None:
        event = super().ask()
        if event is not None and self._curves is not None:
            self._curves.settle()  # who concludes goes on with them
        return event

    def late(self) -> RefitError:
        self._stop()
        return TimedOut(f"{self.job}: stopped, the run's time is over. Raise timeout_hours, or give it less to do.")

    async def on_kill(self) -> None:
        """A person ended the task: the job ends with it, its checkpoints stay."""
        self.log.info("stopping the job: its task was ended by hand")
        await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        job = self._document or Job.load(self.job)
        backends.named(self.backend).stop(job.output, grace=pods.grace(job))
        projection.mark(job, State.SUSPENDED, "stopped")
        (self._curves or tracking.Follower(job)).end(tracking.KILLED)

    def _last_sign(self, status: dict[str, Any] | None) -> float:
        return max(self.since, float((status or {}).get("heartbeat") or 0))

    def _hung(self, job: Job, silent: float) -> dict[str, Any]:
        backends.named(self.backend).stop(job.output, grace=pods.grace(job))
        why = f"no sign of life for {duration(silent)}; stopped, to be started again from its last checkpoint"
        projection.mark(job, State.RETRYING, why)
        return failed(Hung(f"{job.id}: {why}"))

    def _carry_lines(self, output: str) -> None:
        lines, self.cursor = backends.named(self.backend).logs(output, self.cursor)
        for text in lines[-LINES:]:
            self.log.info("%s", text)

    def _carry_events(self, job: Job, now: float) -> dict[str, Any] | None:
        """Copy what is new; the event that ends the wait where it says that a machine is slow."""
        at, count = self._projected
        if now - at < PROJECT_SECONDS:
            return None
        try:
            events = read_events(store_for(job.output).read(join(job.output, EVENTS)).decode())
        except FileNotFoundError:
            events = []
        if len(events) != count and not projection.project(job, self.run_id):
            events = events[:count]  # not written: again next time
        self._projected = (now, len(events))
        slow = [event for event in slow_now(events, job.attempt) if event in events[count:]]
        return self._leave(job, slow[0]) if slow else None

    def _leave(self, job: Job, event: dict[str, Any]) -> dict[str, Any] | None:
        """Have the slow machine avoided; where the next try can go elsewhere, stop this one after a checkpoint."""
        backend = backends.named(self.backend)
        host, why = str(event["slow_rank"].get("host")), str(event["reason"])
        node = backend.node_of(job.output, host)
        should_leave = nodes.quarantine(node or host, why, job.id)
        if node is None or not should_leave:  # it would come back to where it is, or has
            return None
        backend.stop(job.output, grace=pods.grace(job))
        projection.mark(job, State.RETRYING, why)
        return failed(NodeSlow(f"{job.id}: node {node}: {why}; it is avoided from now on, the job goes on elsewhere"))


def slow_now(events: Iterable[dict[str, Any]], attempt: int) -> list[dict[str, Any]]:
    """Of a try's events, those by which a rank is slow still: the last word on each counts.

    A triggerer that restarts reads all of them again, also of a rank that has recovered since.
    """
    last: dict[Any, dict[str, Any]] = {}
    for event in events:
        told = event.get("slow_rank")
        if event.get("attempt") == attempt and isinstance(told, dict):
            last[told.get("rank")] = event
    return [event for event in last.values() if not event["slow_rank"].get("over")]


class CheckpointTrigger(Watch):
    """Waits for a training's first complete checkpoint at or after a step, for its end, for its task's, or a stall.

    Reads manifests and heartbeats only: what has no manifest does not exist, however new its folder. `beside` names the
    task that trains (dag_id, run_ids, task_ids): when it ends badly there is nothing to wait for. With `step` None no
    checkpoint counts, only the end. `full` passes over checkpoints of weights alone (`fast-step-N`). With
    `stall_seconds` the wait ends when no heartbeat came for so long, `since` counting as the first.
    """

    def __init__(
        self, *, output: str, step: int | None, beside: dict[str, Any], full: bool = False,
        stall_seconds: float | None = None, since: float = 0.0, **wait: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            output=output, step=step, beside=beside, full=full, stall_seconds=stall_seconds, since=since, **wait
        )
        self.output = output
        self.step = step
        self.beside = beside
        self.full = full
        self.stall_seconds = stall_seconds
        self.since = since

    def look(self) -> dict[str, Any] | None:
        store = store_for(self.output)
        found = None if self.step is None else next(self._complete(self.step), None)
        if found is not None:
            return done(checkpoint=found, why="checkpoint")
        if store.manifest(self.output) is not None:
            return done(checkpoint=self.output, why="finished")
        states = RuntimeTaskInstance.get_task_states(**self.beside)
        ended = {state for tasks in states.values() for state in tasks.values()} & GIVEN_UP
        return {"status": "nothing"} if ended else self._stalled()

    def _complete(self, least: int) -> Iterator[str]:
        """Complete checkpoints from a step on, the lowest first; a full one before a fast one of the same step."""
        store, folder = store_for(self.output), join(self.output, "checkpoints")
        names = [(step, fast, name) for name in store.children(folder) for step, fast in _read_name(name)]
        for step, fast, name in sorted(names):
            uri = join(folder, name)
            if step >= least and not (fast and self.full) and store.manifest(uri) is not None:
                yield uri

    def _stalled(self) -> dict[str, Any] | None:
        if self.stall_seconds is None:
            return None
        heard = max(self.since, float((status_of(self.output) or {}).get("heartbeat") or 0))
        silent = time.time() - heard
        if silent <= self.stall_seconds:
            return None
        complete = list(self._complete(0))
        return done(checkpoint=complete[-1] if complete else None, why="stalled", silent=silent)

    def late(self) -> RefitError:
        return TimedOut(f"{self.output}: no complete checkpoint at or after step {self.step} in time")


def _read_name(name: str) -> Iterator[tuple[int, bool]]:
    """Step, and whether it holds weights alone, of a checkpoint's folder; nothing for another folder."""
    kind, _, number = name.rpartition("-")
    if kind in ("step", "fast-step") and number.isdigit():
        yield int(number), kind == "fast-step"


class ServerTrigger(Watch):
    """Waits until the model server of a release answers a real completion."""

    def __init__(self, *, release_id: str, champion_of: str | None = None, **wait: Any) -> None:
        super().__init__(release_id=release_id, champion_of=champion_of, **wait)
        self.release_id = release_id
        self.champion_of = champion_of
        self._why = ""

    def look(self) -> dict[str, Any] | None:
        controller = Controller()
        server = controller.server(self.release_id)
        state, self._why = server.get("state"), str(server.get("why") or "")
        if state == "failed":
            return failed(ServerUnavailable(f"the server of {self.release_id} did not start: {self._why}"))
        if state != "ready":
            return None
        if self.champion_of is not None:
            champion = controller.champion(self.champion_of)
            if champion is None or champion.id != self.release_id:
                return None
        return done(release_id=self.release_id, url=server.get("url"))

    def late(self) -> RefitError:
        return ServerUnavailable(
            f"the server of {self.release_id} is not ready in time: {self._why or 'it says nothing'}"
        )


class RolloutTrigger(Watch):
    """Waits for the controller's verdict on a step.

    It does not roll back when the task is ended by hand: the controller keeps the step's deadline whatever Airflow
    does, and a cleared task goes on where the rollout stands.
    """

    def __init__(self, *, rollout_id: str, step: int, **wait: Any) -> None:
        super().__init__(rollout_id=rollout_id, step=step, **wait)
        self.rollout_id = rollout_id
        self.step = step
        self._said = ""

    def look(self) -> dict[str, Any] | None:
        rollout = Controller().rollout(self.rollout_id)
        why = str(rollout.get("why") or "")
        if (said := f"{rollout['weight']} %: {rollout['verdict']}: {why}") != self._said:
            self._said = said
            self.log.info("%s", said)
        settled = rollout["state"] != "running" or rollout["step"] > self.step or rollout["verdict"] != "wait"
        return done(rollout=rollout) if settled else None

    def late(self) -> RefitError:
        return ServerUnavailable(f"no verdict on step {self.step} of {self.rollout_id}, long after its deadline")
