"""The life of model servers: wanted → starting → ready (a real completion came back) → retired; hung ones are ended.

GET /health answers while an engine hangs, and a process may run without ever having loaded its model. So a server is
ready when a completion with its own release's name and header came back, and is asked again every few seconds.

What it does not do: decide who gets traffic. It refuses to end a server that the route table names.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import StrEnum

import httpx

from refit import log
from refit.errors import BadInput, Infrastructure
from refit.release import Release
from serving.alerts import Alerts
from serving.servers import Process, Record, Records, ServerHost

START_SECONDS = 900.0
CHECK_SECONDS = 5.0
PROBE_SECONDS = 15.0
DRAIN_SECONDS = 10.0
"""A server ends no sooner after it left the routes: requests that were under way reach it and come back."""
PATIENCE = 3
"""Failed checks in a row before a server counts as away; restarts before one that never answered counts as failed."""


class ServerState(StrEnum):
    """What a server is, to those who wait for it."""

    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True)
class Health:
    """What is known of one server."""

    state: ServerState
    url: str = ""
    why: str = ""
    process: int = 0
    restarts: int = 0
    misses: int = 0
    tokens: float = -1.0
    checked: float = field(default=0.0)


class Fleet:
    """All model servers of a stack."""

    def __init__(self, host: ServerHost, records: Records, alerts: Alerts) -> None:
        self._host = host
        self._records = records
        self._alerts = alerts
        self.needed: Callable[[], set[str]] = set
        self._lock = threading.RLock()
        self._health: dict[str, Health] = {}
        self._needed_at: dict[str, float] = {}
        self._ending: dict[str, Release | None] = {}
        """Servers that are being ended, and what is to be started again after it."""
        self._client = httpx.Client(timeout=PROBE_SECONDS, trust_env=False)

    # ------------------------------------------------------------------------------------------------ for callers

    def want(self, release: Release) -> None:
        """Ask for a server; idempotent, and does not wait. One that failed or is about to end is wanted again."""
        with self._lock:
            if release.id in self._ending:
                self._ending[release.id] = release
                return
            record = self._records.all().get(release.id)
            if record is None:
                record = Record(release=release, port=self._records.free_port(), asked_at=time.time())
                self._records.put(record)
            elif record.failed or record.retire_at is not None:
                again = {"failed": "", "retire_at": None, "asked_at": time.time() if record.failed else record.asked_at}
                self._records.put(record.model_copy(update=again))
                if record.failed:
                    self._health.pop(release.id, None)

    def retire(self, release: str, after: float = 0.0) -> None:
        """Let a server end `after` seconds from now, once it is out of the routes and idle."""
        with self._lock:
            record = self._records.all().get(release)
            if record is not None:
                self._records.put(record.model_copy(update={"retire_at": time.time() + after}))

    def due(self, release: str) -> bool:
        """Whether the time has come at which a server may end."""
        record = self._records.all().get(release)
        return record is not None and record.retire_at is not None and time.time() >= record.retire_at

    def health(self, release: str) -> Health:
        """What is known of a server."""
        with self._lock:
            record = self._records.all().get(release)
            if record is None:
                return Health(ServerState.STOPPED, why="no such server runs")
            if record.failed:
                return Health(ServerState.FAILED, record.url, record.failed)
            return self._health.get(release, Health(ServerState.STARTING, record.url, "asked for"))

    def releases(self) -> list[str]:
        """Releases that have a server, in whatever state."""
        return list(self._records.all())

    # --------------------------------------------------------------------------------------------------- the watch

    def run(self, stop: threading.Event) -> None:
        """Watch until told to stop."""
        with ThreadPoolExecutor(8, thread_name_prefix="server") as pool:
            while not stop.wait(0.5):
                list(pool.map(self._guarded, self._records.all().values()))

    def _guarded(self, record: Record) -> None:
        try:
            self.look(record)
        except Infrastructure as error:  # the host, or the store that a model comes from
            log.event("server", release=record.release.id, state="not seen", why=str(error))

    def look(self, record: Record) -> None:
        """One look at one server."""
        release, now = record.release.id, time.time()
        if release in self.needed():
            self._needed_at[release] = now
        elif self._may_end(record, now):
            self._end(record)
            return
        if record.failed:
            return
        process = self._host.process(release)
        if process is None:
            self._begin(record)
            return
        before = self._health.get(release, Health(ServerState.STARTING, record.url, process=process.number))
        if process.number != before.process and before.process and process.running:
            before = self._restarted(record, before, process)
        if not process.running:
            self._note(release, replace(before, state=ServerState.STARTING, why=process.why))
            return
        if before.state is ServerState.READY and now - before.checked < CHECK_SECONDS:
            return
        self._check(record, replace(before, process=process.number, checked=now))

    def _begin(self, record: Record) -> None:
        try:
            self._host.start(record)
        except BadInput as error:
            self._fail(record, str(error))
            return
        log.event("server", release=record.release.id, state="started", url=record.url)

    def _restarted(self, record: Record, before: Health, process: Process) -> Health:
        restarts = before.restarts + 1
        words = self._host.last_words(record.release.id)
        self._alerts.suspicious(
            "servers", f"the server of release {record.release.id} was started again ({restarts}): {words}",
            pipeline=record.release.pipeline, key=f"restart-{record.release.id}-{process.number}",
        )  # fmt: skip
        if restarts >= PATIENCE and before.state is not ServerState.READY and not record.ready_once:
            self._fail(record, f"it ended {restarts} times before it answered: {words}")
        why = "started again after it ended"
        return replace(before, state=ServerState.STARTING, why=why, restarts=restarts, process=process.number, misses=0)

    def _check(self, record: Record, before: Health) -> None:
        release = record.release.id
        wrong = self._probe(record)
        if wrong is None:
            if before.state is not ServerState.READY:
                log.event("server", release=release, state="ready", seconds=time.time() - record.asked_at)
            self._note(release, replace(before, state=ServerState.READY, why="", misses=0))
            if not record.ready_once:
                self._update(release, ready_once=True)
            return
        if before.state is ServerState.STARTING:
            if time.time() - record.asked_at > START_SECONDS and not record.ready_once:
                self._fail(record, f"not ready after {START_SECONDS:.0f} s: {wrong}")
            else:
                self._note(release, replace(before, why=wrong))
            return
        tokens = self._tokens(record)
        if tokens > before.tokens >= 0:
            # Busy, not hung: the answer to our probe only waits its turn.
            self._note(release, replace(before, tokens=tokens, misses=0))
        elif before.misses + 1 < PATIENCE:
            self._note(release, replace(before, tokens=tokens, misses=before.misses + 1, why=wrong))
        else:
            message = f"the server of release {release} makes no progress ({wrong}); it is started again"
            self._alerts.suspicious("servers", message, pipeline=record.release.pipeline)
            self._note(release, replace(before, state=ServerState.STARTING, why=wrong, misses=0, tokens=-1.0))
            self._host.restart(release)

    def _probe(self, record: Record) -> str | None:
        """Ask for one token; None when this very release answered, otherwise what was wrong."""
        question = {
            "model": record.release.id, "prompt": "Are you there?", "max_tokens": 1, "temperature": 0.0, "top_p": 1.0,
        }  # fmt: skip
        try:
            answer = self._client.post(f"{record.url}/v1/completions", json=question)
            if answer.status_code != 200:
                return f"a completion was answered with {answer.status_code}"
            if answer.headers.get("x-refit-release") != record.release.id:
                return f"another server answers on {record.url}"
            answer.json()["choices"][0]["text"]
        except httpx.HTTPError as error:
            return f"no answer on {record.url} ({type(error).__name__})"
        except (ValueError, KeyError, IndexError, TypeError):
            return "the answer is no completion"
        return None

    def _tokens(self, record: Record) -> float:
        return self._metric(record, "vllm:generation_tokens_total")

    def _metric(self, record: Record, name: str) -> float:
        """The sum of a metric of vLLM; -1 where it cannot be had."""
        try:
            text = self._client.get(f"{record.url}/metrics", timeout=3.0).text
        except httpx.HTTPError:
            return -1.0
        values = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        return sum(float(value) for value in values) if values else -1.0

    # ----------------------------------------------------------------------------------------------------- the end

    def _may_end(self, record: Record, now: float) -> bool:
        if record.retire_at is None or now < record.retire_at:
            return False
        # A controller that has just started does not know when the server left the routes.
        out_for = now - self._needed_at.setdefault(record.release.id, now)
        if out_for < DRAIN_SECONDS:
            return False
        return out_for > 10 * DRAIN_SECONDS or self._metric(record, "vllm:num_requests_running") <= 0

    def _end(self, record: Record) -> None:
        release = record.release.id
        with self._lock:
            now = self._records.all().get(release)
            if now is None or now.retire_at is None:
                return  # wanted again a moment ago
            self._ending[release] = None
        self._host.stop(release)
        with self._lock:
            self._records.drop(release)
            self._health.pop(release, None)
            self._needed_at.pop(release, None)
            again = self._ending.pop(release)
            if again is not None:
                self.want(again)
        log.event("server", release=release, state="stopped")

    def _fail(self, record: Record, why: str) -> None:
        self._alerts.suspicious(
            "servers", f"release {record.release.id} cannot be served: {why}", pipeline=record.release.pipeline
        )
        self._update(record.release.id, failed=why)
        self._host.stop(record.release.id)

    def _update(self, release: str, **changes: object) -> None:
        with self._lock:
            record = self._records.all().get(release)
            if record is not None:
                self._records.put(record.model_copy(update=changes))

    def _note(self, release: str, health: Health) -> None:
        with self._lock:
            self._health[release] = health
