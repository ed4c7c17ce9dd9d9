"""A job: a program that reads one document and writes one document, as a local process or in a pod alike.

In:  REFIT_JOB=<uri> names job.json. Out, in the folder `output`: events.jsonl (state changes), status.json (progress
and heartbeat), the outputs, and last manifest.json. Success is derived from the manifest and from nothing earlier.

A job knows the store and nothing else: no database, no password.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from refit import files, fingerprint, log, place, states
from refit.errors import BadInput, BadSpec, Occupied, Preempted, RefitError, StoreUnavailable
from refit.manifest import MANIFEST, Manifest
from refit.pipeline import explain
from refit.place import Place
from refit.spec import Pipeline
from refit.states import State
from refit.store import FileStore, Store, cache_folder, join, store_for

JOB, EVENTS, STATUS = "job.json", "events.jsonl", "status.json"

FOLLOW_SECONDS = 20.0
"""How long who has the output of a job waits for its predecessor to say its last word."""

UNTOLD = "its manifest is there; who wrote it was ended before it could say so"
"""The reason of a success that a kill kept from being told."""


class Job(BaseModel):
    """The document a job starts from. `inputs` and `output` are URIs of folders; `options` is what a stage adds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    kind: str
    pipeline: str
    team: str
    owner: str
    spec: Pipeline
    store: str
    output: str
    inputs: dict[str, str] = {}
    options: dict[str, Any] = {}
    attempt: int = 1

    @property
    def uri(self) -> str:
        """Where job.json lies."""
        return join(self.output, JOB)

    @classmethod
    def build(cls, kind: str, spec: Pipeline, *, store: str, output: str, **more: Any) -> Job:
        """A job for a spec; its id is the kind and the end of its folder's name unless one is given."""
        name = output.rstrip("/").rsplit("/", 1)[-1]
        return cls(
            id=more.pop("id", f"{kind}-{name}"), kind=kind, pipeline=spec.name, team=spec.team, owner=spec.owner,
            spec=spec, store=store, output=output, **more,
        )  # fmt: skip

    def save(self) -> str:
        """Write job.json; returns its URI."""
        store_for(self.output).write(self.uri, self.model_dump_json(indent=1).encode())
        return self.uri

    @classmethod
    def load(cls, uri: str) -> Job:
        """Read a job document.

        Raises:
            BadSpec: it is not there, or not a job.
        """
        try:
            return cls.model_validate_json(store_for(uri).read(uri))
        except FileNotFoundError as error:
            raise BadSpec(f"{uri}: no job document there. REFIT_JOB must name a job.json.") from error
        except ValidationError as error:
            raise BadSpec("\n".join(f"{uri}: {line}" for line in explain(error))) from error


class JobRun:
    """A job while it runs: its folder on this machine, its progress, its events.

    The folder is local; on S3 it is a scratch folder whose small files are uploaded as they change.
    """

    def __init__(self, job: Job, folder: Path, place: Place | None = None) -> None:
        self.job = job
        self.folder = folder
        self._place = place
        self.store: Store = store_for(job.output)
        self._started = time.time()
        self._status: dict[str, Any] = {}
        self._lock = threading.Lock()

    @property
    def spec(self) -> Pipeline:
        """The whole spec of the line."""
        return self.job.spec

    def progress(self, phase: str, done: float, total: float, **more: Any) -> None:
        """Say how far the work is; also the heartbeat. `done` and `total` share a unit of the caller's choice."""
        now = time.time()
        left = (now - self._started) / done * (total - done) if done > 0 else None
        status = {
            "id": self.job.id, "kind": self.job.kind, "phase": phase, "done": done, "total": total,
            "seconds_left": left, "started": self._started, "heartbeat": now, "host": socket.gethostname(),
            "pid": os.getpid(), **more,
        }  # fmt: skip
        with self._lock:
            self._status = status
            self.put(STATUS, json.dumps(status, default=str).encode())

    def event(self, state: State, reason: str, **more: Any) -> None:
        """Record a change of state, with its reason; numbered, so that a reader can project it idempotently.

        `running` while it runs is a remark.

        Raises:
            ValueError: a job in its state cannot become that.
        """
        self._record(state, reason, **more)

    def again(self, *, alone: bool = False) -> None:
        """Record that a job which had ended is taken up once more; `alone` when nobody else runs it, so that one which
        is said to run was killed."""
        now = self._state()
        if now in (State.FAILED, State.SUSPENDED):
            self._record(State.RETRYING, f"was {now}; attempt {self.job.attempt}")
        elif now is State.SUCCEEDED:
            self._record(State.RETRYING, "had succeeded, and its manifest is gone: it is done anew", checked=False)
        elif alone and now is State.RUNNING:
            self._record(State.RETRYING, f"who ran it last ended without a word; attempt {self.job.attempt}")

    def begin(self) -> None:
        """Record that this attempt runs, and that it is another where it is."""
        self.again(alone=self._place is not None and self._place.alone)
        host = socket.gethostname()
        self.event(State.RUNNING, f"attempt {self.job.attempt} on {host}", pid=os.getpid(), node=host)

    def follow(self) -> None:
        """Begin anew where another process ran the job when this one came, and has ended since: what it said last is
        not what this one goes on from. Called by who has been given its place.

        Raises:
            Occupied: it has done the job.
        """
        if self._place is None or not self._place.shared or not self._place.wait(FOLLOW_SECONDS):
            return
        if self.store.manifest(self.job.output) is not None:
            raise Occupied(f"{self.job.output}: who ran the job before has done it. Ask again: it is answered.")
        self.begin()

    def answered(self) -> None:
        """Say of a job whose manifest is there that it has succeeded, where a kill kept that from being said."""
        now = self._state()
        if now is None or now is State.SUCCEEDED:  # nobody told anything, or all is told
            return
        self.again()
        if now is not State.RUNNING:
            self.event(State.RUNNING, "there is nothing left to do")
        self.event(State.SUCCEEDED, UNTOLD)

    def _state(self) -> State | None:
        path = self.folder / EVENTS
        return _last(path)[1] if path.is_file() else None

    def _record(self, state: State, reason: str, *, checked: bool = True, **more: Any) -> None:
        # Locked, and read anew: a process that finds the job taken has told of itself in between.
        with self._lock, _locked(self.folder / EVENTS):
            sequence, now = _last(self.folder / EVENTS)
            if now is state is State.SUCCEEDED:  # who found the manifest has said so before who wrote it could
                return
            if checked and now is not None and not now is state is State.RUNNING:
                states.step(now, state)
            record = {
                "job": self.job.id, "sequence": sequence + 1, "at": datetime.now(UTC).isoformat(), "state": state,
                "reason": reason, "attempt": self.job.attempt, **more,
            }  # fmt: skip
            files.append(self.folder / EVENTS, json.dumps(record, default=str).encode())
            if not isinstance(self.store, FileStore):
                self._upload_events()
        log.event("job", **{key: value for key, value in record.items() if key not in ("at", "sequence")})

    def _upload_events(self) -> None:
        """Have the store's copy follow. Where it is away the next event brings this one along: a word that comes late
        ends no work."""
        try:
            self.put(EVENTS, (self.folder / EVENTS).read_bytes())
        except StoreUnavailable as error:
            log.event("event_not_uploaded", job=self.job.id, why=str(error))

    def commit(self, manifest: Manifest) -> Manifest:
        """Write the manifest: the job has succeeded from here on."""
        self.put(MANIFEST, manifest.model_dump_json(indent=1).encode())
        return manifest

    def put(self, name: str, data: bytes) -> None:
        """Write a file of the job's folder, whole or not at all."""
        self.store.write(join(self.job.output, name), data)


Handler = Callable[[JobRun], Manifest]


def run(job: Job, handler: Handler) -> Manifest:
    """Run a job in this process: events around it, the manifest last; a committed output is answered from it.

    Raises:
        RefitError: what went wrong, in the contract's terms; the event says so too.
    """
    store = store_for(job.output)
    done = store.manifest(job.output)
    if done is not None:
        log.event("answered", job=job.id, output=job.output)
        try:
            JobRun(job, _folder_of(job.output, store)).answered()
        except (OSError, ValueError, StoreUnavailable) as error:  # an answer is one also where nothing can be written,
            # or somebody else tells of it at the same time
            log.event("not_told", job=job.id, why=str(error))
        return done
    log.bind(job=job.id)
    folder = _folder_of(job.output, store)
    with place.taken(folder) as ours:
        return _attempt(JobRun(job, folder, ours), handler)


def _attempt(running: JobRun, handler: Handler) -> Manifest:
    """Do a job's work with its events around it."""
    running.begin()
    running.progress("start", 0, 1)
    try:
        manifest = running.commit(handler(running))
    except Occupied:
        done = running.store.manifest(running.job.output)
        if done is None:
            raise  # it is the other's job, and the other's to tell of
        return done
    except RefitError as error:
        state = State.SUSPENDED if isinstance(error, Preempted) else State.FAILED
        running.event(state, str(error), exit_code=error.exit_code, error=type(error).__name__)
        raise
    except BaseException as error:
        running.event(
            State.FAILED, f"{type(error).__name__}: {error}", exit_code=1, traceback=traceback.format_exc()[-4000:]
        )
        raise
    running.event(State.SUCCEEDED, "manifest written")
    return manifest


def _folder_of(output: str, store: Store) -> Path:
    """The job's folder on this machine. Elsewhere than on a disk it is a scratch copy, whose events go on counting."""
    if isinstance(store, FileStore):
        folder = store.path(output)
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    folder = cache_folder() / "jobs" / fingerprint.digest(output)[:32]
    known = store.exists(join(output, EVENTS))
    if not known:
        # What lies here is of a job that the store knows nothing of any more: it was removed there to be done anew.
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    if known:
        files.write(folder / EVENTS, store.read(join(output, EVENTS)))
    return folder


def run_from_environment(handlers: Mapping[str, Handler]) -> Manifest:
    """Run the job that REFIT_JOB names, with the handler of its kind."""
    uri = os.environ.get("REFIT_JOB")
    if not uri:
        raise BadInput("REFIT_JOB is not set: give a subcommand (see --help), or the address of a job.json.")
    job = Job.load(uri)
    if job.kind not in handlers:
        raise BadSpec(f"{uri}: this program has no {job.kind!r}; it does {', '.join(sorted(handlers))}.")
    return run(job, handlers[job.kind])


def read_events(text: str) -> list[dict[str, Any]]:
    """The records of an events.jsonl; a line that a kill cut short is passed over."""
    records = []
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def last_word(events: Sequence[dict[str, Any]], *, committed: bool) -> dict[str, Any]:
    """The event by which a job stands; of a job that is `committed` a success, also where a kill kept it untold."""
    last = events[-1] if events else {}
    return {**last, "state": State.SUCCEEDED, "reason": UNTOLD} if committed and not _succeeded(last) else last


def _succeeded(event: Mapping[str, Any]) -> bool:
    return event.get("state") == State.SUCCEEDED


def _last(path: Path) -> tuple[int, State | None]:
    """Number and state of the last event; 0 and None where there was none."""
    records = read_events(path.read_text(encoding="utf-8"))
    last = max(records, key=lambda record: int(record.get("sequence", 0)), default={})
    return int(last.get("sequence", 0)), State(last["state"]) if "state" in last else None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a file, made if need be, against the other processes that ask for it so."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def report(manifest: Manifest, output: str) -> dict[str, Any]:
    """What a program prints of a finished job."""
    print(f"done: {output}", file=sys.stderr)
    return {"manifest": join(output, MANIFEST), "fingerprint": manifest.fingerprint, **manifest.facts}
