"""Jobs as processes on this machine, each under a keeper in a session of its own.

A job's records lie in $REFIT_HOME/jobs/<mark>/, where the mark follows from the output folder; so a retry, another
worker or the triggerer finds the same process without being told.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

from operators.backends import keeper
from operators.backends.base import Backend, Phase, Standing
from refit import connections, fingerprint, proc
from refit.errors import BY_EXIT_CODE, BadInput, Infrastructure, NodeLost, from_exit_code
from refit.job import EVENTS, Job, read_events
from refit.store import join, store_for

if TYPE_CHECKING:
    from kubernetes.client import V1Pod

PROGRAMS = {
    "prepare": "corpus",
    "share": "corpus",
    "plan": "trainer",
    "preflight": "trainer",
    "trial": "trainer",
    "early": "trainer",
    "smoke": "trainer",
    "train": "trainer",
    "evaluate": "evaluator",
    "compare": "evaluator",
}
"""Which program does a job of this kind."""

PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "REFIT_STORE", "REFIT_CACHE", "REFIT_CACHE_GIB",
             "REFIT_COMPUTE_PYTHON", proc.STACK_TAG)  # fmt: skip
"""All that any job inherits: never a password, never a token. A data job has the connections of its sources besides."""

STORE_ACCESS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION",
                "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE",
                "AWS_PROFILE")  # fmt: skip
"""What else it inherits when its store, or something that it reads or writes beside it, is on S3."""

START_SECONDS = 60.0
"""How long a keeper may take to say that it is there; a loaded machine is slow, not broken."""

LOST_THE_RACE = (keeper.ANOTHER_RUNS, -int(signal.SIGTERM), -int(signal.SIGKILL))
"""How a keeper ends that found another in its place, or was taken by it for a leftover."""

LOG_BYTES = 64 * 1024
"""At most this much of a log is read at once."""


class LocalBackend(Backend):
    """Processes on this machine, found again by their job's mark."""

    name: ClassVar[str] = "local"

    def __init__(self, home: Path | None = None, programs: Path | None = None) -> None:
        given = os.environ.get("REFIT_HOME")
        if home is None and not given:
            raise BadInput("REFIT_HOME is not set: the local backend keeps the records of its processes there.")
        self._jobs = (home or Path(str(given))) / "jobs"
        self._programs = programs or Path(os.environ.get("REFIT_PROGRAMS") or Path(sys.executable).parent)

    def submit(self, job: Job, pod: Callable[[], V1Pod] | None = None) -> bool:
        program = self._program(job.kind)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.adopt(job.output):
                return False
            job.save()
            if self._start(job, program, deadline):
                return True
            time.sleep(proc.POLL_SECONDS)  # another keeper was faster, and has not said yet who it is
        raise Infrastructure(f"no keeper took the place for {job.output} in {START_SECONDS:.0f} s.")

    def adopt(self, output: str) -> bool:
        identity = self.identity(output)
        return identity is not None and proc.alive(identity)

    def state(self, output: str) -> Standing:
        identity = self.identity(output)
        if identity is None:
            return Standing(Phase.ABSENT, "nothing was started")
        if proc.alive(identity):
            return Standing(Phase.RUNNING, f"process {identity.pid}")
        code = _read(self.folder(output) / keeper.EXIT).get("code")
        if code is None:
            fault = NodeLost(
                f"process {identity.pid} is gone and left no exit code: it was killed, or the machine was."
            )
            return Standing(Phase.ENDED, str(fault), None, fault)
        if code == 0:
            return Standing(Phase.ENDED, "exit 0", 0)
        why = self._reason(output, code)
        return Standing(Phase.ENDED, why, code, Infrastructure(why) if code < 0 else from_exit_code(code, why))

    def logs(self, output: str, cursor: str = "") -> tuple[list[str], str]:
        path = self.folder(output) / keeper.OUTPUT
        start = int(cursor or 0)
        if not path.is_file():
            return [], str(start)
        with path.open("rb") as handle:
            handle.seek(start)
            data = handle.read(LOG_BYTES)
        whole = data.rfind(b"\n") + 1
        if not whole and len(data) == LOG_BYTES:
            whole = LOG_BYTES  # one line longer than we read: in pieces, not never
        return data[:whole].decode(errors="replace").splitlines(), str(start + whole)

    def end_of_log(self, output: str) -> str:
        path = self.folder(output) / keeper.OUTPUT
        return str(path.stat().st_size if path.is_file() else 0)

    def stop(self, output: str, *, grace: float = 20.0) -> bool:
        return bool(proc.kill_tree(self.identity(output), tag=mark(output), grace=grace))

    def identity(self, output: str) -> proc.Identity | None:
        """The keeper that was last started for this output; it may have ended long ago."""
        record = _read(self.folder(output) / keeper.PROCESS)
        return proc.Identity.from_json(record["identity"]) if record else None

    def folder(self, output: str) -> Path:
        """Where the records of this output's process lie."""
        return self._jobs / mark(output)

    def _program(self, kind: str) -> Path:
        name = PROGRAMS.get(kind)
        if name is None:
            raise BadInput(f"no program does a job of kind {kind!r}; known kinds: {', '.join(PROGRAMS)}.")
        path = self._programs / name
        if not os.access(path, os.X_OK):
            raise BadInput(f"{path}: no such program. Run `make setup`.")
        return path

    def _start(self, job: Job, program: Path, deadline: float) -> bool:
        """Start a keeper and wait until it has taken the place; False when another has it."""
        folder = self.folder(job.output)
        folder.mkdir(parents=True, exist_ok=True)
        child = proc.spawn(
            [sys.executable, "-m", "operators.backends.keeper", folder, program],
            env=environment(job), cwd=folder, tag=mark(job.output),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        ours = proc.Identity.of(child.pid)  # a child that nobody has waited for cannot lose its pid
        while time.monotonic() < deadline:
            ended = child.poll()
            if self.identity(job.output) == ours:
                return True
            if ended is not None:
                if ended in LOST_THE_RACE:
                    return False
                raise Infrastructure(f"the keeper of {job.output} ended with {ended} before it started anything.")
            time.sleep(proc.POLL_SECONDS)
        return False

    def _reason(self, output: str, code: int) -> str:
        """Why a program ended so: its own words if it found any, else the end of what it printed."""
        store = store_for(output)
        if code in BY_EXIT_CODE:
            try:
                events = read_events(store.read(join(output, EVENTS)).decode())
            except FileNotFoundError:
                events = []
            if events and events[-1].get("exit_code") == code:
                return str(events[-1]["reason"])
        last = _tail(self.folder(output) / keeper.OUTPUT)
        how = f"killed by signal {-code}" if code < 0 else f"exit {code}"
        return f"{how}: {last}" if last else how


def mark(output: str) -> str:
    """The name of a job on this machine, and what its processes carry in their environment."""
    return fingerprint.digest(output.rstrip("/"))[:20]


def environment(job: Job, given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """All that a job's program gets to see: a whitelist, so that no secret slips through."""
    train = job.spec.train
    places = [
        job.store, *(source.uri for source in job.spec.data.sources), *job.inputs.values(),
        train.base, train.warm_start, train.checkpoint.copy_to,
    ]  # fmt: skip
    names = PASSED_ON + (STORE_ACCESS if any(urlsplit(place or "").scheme == "s3" for place in places) else ())
    if job.kind == "prepare":
        names += connections.variables(job.spec)
    return {
        **{name: given[name] for name in names if given.get(name)},
        "REFIT_JOB": job.uri,
        "REFIT_STORE": job.store,
        "PYTHONUNBUFFERED": "1",
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _tail(path: Path, lines: int = 3) -> str:
    """The end of what a program printed, less the JSON object that programs print last."""
    if not path.is_file():
        return ""
    with path.open("rb") as handle:
        handle.seek(max(0, path.stat().st_size - 4096))
        text = handle.read().decode(errors="replace")
    said = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith('{"error"')]
    return " | ".join(said[-lines:])[-600:]
