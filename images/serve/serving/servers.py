"""Where model servers live, behind one interface: under supervisor here, a Deployment on a cluster.

A server is named by its release, since a release is what answers. Its record (a file a server) is written before the
server is started and removed after it has ended, so that nothing runs that no record tells of.
"""

from __future__ import annotations

import shutil
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from refit import fetched, files, log
from refit.errors import BadInput, Damaged, ServerUnavailable
from refit.release import Release
from refit.store import store_for
from serving import vllm
from serving.settings import HOST, Settings
from serving.supervisor import Supervisor

RUNS_CODE = (".py", ".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
"""Files that a loader may execute (pickle is a program); a model folder has none of them."""


class Record(BaseModel):
    """A server that is wanted. `retire_at` (seconds since 1970) is when it may end, unless somebody wants it again."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    release: Release
    port: int
    asked_at: float
    ready_once: bool = False
    failed: str = ""
    retire_at: float | None = None

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://{HOST}:{self.port}"


@dataclass(frozen=True)
class Process:
    """A server's process as its host sees it; `number` changes with every restart."""

    running: bool
    number: int
    why: str


class ServerHost(ABC):
    """Starts, watches and ends the processes of model servers."""

    @abstractmethod
    def start(self, record: Record) -> None:
        """Start a server unless it runs; does not wait for it.

        Raises:
            BadInput: the release cannot be served (a damaged model, a file that would be executed).
            ServerUnavailable: the host does not answer.
        """

    @abstractmethod
    def stop(self, release: str) -> None:
        """End a server and return when it has ended; harmless when there is none."""

    @abstractmethod
    def restart(self, release: str) -> None:
        """End a server's process and start another."""

    @abstractmethod
    def process(self, release: str) -> Process | None:
        """Its process; None where there is none. ServerUnavailable where the host does not answer."""

    @abstractmethod
    def last_words(self, release: str) -> str:
        """The end of its log, for a message."""


class SupervisorHost(ServerHost):
    """Model servers as supervisor's programs."""

    def __init__(self, settings: Settings) -> None:
        if settings.supervisor_socket is None:
            raise BadInput("REFIT_SUPERVISOR_SOCKET is not set; the controller starts model servers through it.")
        conf = settings.home / "supervisor" / "conf.d"
        self._supervisor = Supervisor(settings.supervisor_socket, conf, settings.logs)
        self._settings = settings
        self._models: dict[str, Path] = {}
        """Where the model of each release that was started lies; two may have the same."""
        self._changing = threading.Lock()

    def start(self, record: Record) -> None:
        model = servable(record.release)
        with self._changing:
            self._models[record.release.id] = model
        # Held again: another release of the same model may have ended, and let go, before this one was noted.
        store_for(record.release.model).local(record.release.model)
        self._settings.spool.mkdir(parents=True, exist_ok=True)
        sockets = self._sockets(record.release.id)
        sockets.mkdir(exist_ok=True)
        self._supervisor.add(
            _name(record.release.id),
            vllm.command(self._settings.compute_python, record.release, model, record.port),
            vllm.environment(record.release, self._settings.spool, sockets),
            stop_seconds=vllm.SHUTDOWN_SECONDS + 10,
        )

    def stop(self, release: str) -> None:
        self._supervisor.remove(_name(release))
        shutil.rmtree(self._sockets(release), ignore_errors=True)
        with self._changing:
            model = self._models.pop(release, None)
            if model is not None and model not in self._models.values():
                fetched.let_go(model)

    def _sockets(self, release: str) -> Path:
        """In supervisor's folder: its path is short, as a socket's must be, and it goes when the stack does."""
        assert self._settings.supervisor_socket is not None
        return self._settings.supervisor_socket.parent / release

    def restart(self, release: str) -> None:
        self._supervisor.restart(_name(release))

    def process(self, release: str) -> Process | None:
        found = self._supervisor.process(_name(release))
        if found is None:
            return None
        running = found["statename"] in ("RUNNING", "STARTING")
        return Process(running, int(found["pid"]), f"{found['statename'].lower()} {found['description']}".strip())

    def last_words(self, release: str) -> str:
        path = self._supervisor.log(_name(release))
        try:
            with path.open("rb") as handle:
                handle.seek(max(0, path.stat().st_size - 4000))
                lines = handle.read().decode("utf-8", errors="replace").strip().splitlines()
        except OSError:
            return ""
        errors = [line for line in lines if "Error" in line]
        return (errors or lines or [""])[-1][-400:]


def servable(release: Release) -> Path:
    """The release's model folder on this machine, checked file by file.

    Raises:
        BadInput: it is not the model that the release names, or it holds something that would be executed.
    """
    store = store_for(release.model)
    manifest = store.require(release.model, "model")
    if manifest.content_digest() != release.digest:
        raise BadInput(f"{release.model}: the manifest there is another model's than release {release.id} names.")
    try:
        folder, wrong = store.judged(release.model, manifest)
    except Damaged as error:
        raise BadInput(f"{error} Export it again.") from error
    if wrong:
        raise BadInput(f"{release.model}: the model is damaged: {'; '.join(wrong)}. Export it again.")
    try:
        _look_through(release, folder)
    except BadInput:
        fetched.let_go(folder)
        raise
    return folder


def _look_through(release: Release, folder: Path) -> None:
    names = [path.name for path in folder.rglob("*") if path.is_file()]
    unsafe = [name for name in names if name.endswith(RUNS_CODE)]
    if unsafe:
        raise BadInput(f"{release.model}: {unsafe[0]} would be executed when loaded; export the model as safetensors.")
    if not any(name.endswith(".safetensors") for name in names):
        raise BadInput(f"{release.model}: no .safetensors file; export the model as safetensors.")


class Records:
    """The records' folder."""

    def __init__(self, folder: Path, first_port: int) -> None:
        self._folder = folder
        self._first_port = first_port

    def all(self) -> dict[str, Record]:
        """Every record, by release id."""
        found = {}
        for path in sorted(self._folder.glob("*.json")):
            try:
                record = Record.model_validate_json(path.read_bytes())
            except (OSError, ValidationError) as error:
                log.event("server", state="record skipped", path=str(path), why=str(error).splitlines()[0])
                continue
            found[record.release.id] = record
        return found

    def put(self, record: Record) -> None:
        """Write a record."""
        files.write(self._path(record.release.id), record.model_dump_json(indent=1).encode(), mode=0o600)

    def drop(self, release: str) -> None:
        """Remove a record."""
        self._path(release).unlink(missing_ok=True)

    def free_port(self, free: Callable[[int], bool] | None = None) -> int:
        """A port that no record has and nobody listens on.

        Raises:
            ServerUnavailable: there is none left.
        """
        taken = {record.port for record in self.all().values()}
        for port in range(self._first_port, min(self._first_port + 1000, 65536)):
            if port not in taken and (free or _is_free)(port):
                return port
        raise ServerUnavailable(f"no free port from {self._first_port} on; set REFIT_PORT_SERVERS to another range.")

    def _path(self, release: str) -> Path:
        return self._folder / f"{release}.json"


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def _name(release: str) -> str:
    return f"server-{release}"
