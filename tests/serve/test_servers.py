"""The life of a model server: what may be served, when it is ready, and when it may end."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import serving.fleet
from refit import fetched
from refit.errors import BadInput
from refit.manifest import Manifest
from refit.release import Release
from refit.spec import Serve
from refit.store import join, store_for
from serving import vllm
from serving.fleet import Fleet, ServerState
from serving.servers import Process, Record, Records, ServerHost, SupervisorHost, servable
from serving.settings import Settings
from serving.supervisor import Supervisor


class Alarm:
    def __init__(self) -> None:
        self.raised: list[str] = []

    def suspicious(self, source: str, message: str, **_: object) -> None:
        self.raised.append(message)

    dangerous = suspicious


class Host(ServerHost):
    """A host whose processes are numbers."""

    def __init__(self) -> None:
        self.processes: dict[str, Process] = {}
        self.started: list[str] = []
        self.refuses: str | None = None
        self.numbers = iter(range(100, 1000))

    def start(self, record: Record) -> None:
        if self.refuses:
            raise BadInput(self.refuses)
        self.started.append(record.release.id)
        self.processes[record.release.id] = Process(True, next(self.numbers), "running")

    def stop(self, release: str) -> None:
        self.processes.pop(release, None)

    def restart(self, release: str) -> None:
        self.processes[release] = Process(True, next(self.numbers), "running")

    def process(self, release: str) -> Process | None:
        return self.processes.get(release)

    def last_words(self, release: str) -> str:
        return "ValueError: no such dtype"


class Engine:
    """What answers on a server's port."""

    def __init__(self) -> None:
        self.release, self.status, self.tokens, self.running = "", 200, 0, 0
        double = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                text = f"vllm:generation_tokens_total {double.tokens}\nvllm:num_requests_running {double.running}\n"
                self.reply(200, text.encode())

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                self.reply(double.status, json.dumps({"choices": [{"text": "yes"}]}).encode())

            def reply(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("x-refit-release", double.release)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


class House:
    def __init__(self, folder: Path, engine: Engine, release: Release) -> None:
        self.host, self.alarm, self.engine, self.release = Host(), Alarm(), engine, release
        self.records = Records(folder, engine.port)
        self.fleet = self.again()

    def again(self) -> Fleet:
        """The fleet as another process finds it."""
        self.fleet = Fleet(self.host, self.records, self.alarm)  # type: ignore[arg-type]
        return self.fleet

    def look(self) -> ServerState:
        for record in self.records.all().values():
            self.fleet.look(record)
        return self.fleet.health(self.release.id).state

    def ready(self) -> None:
        self.engine.release = self.release.id
        self.fleet.want(self.release)
        self.look()
        assert self.look() is ServerState.READY


@pytest.fixture
def house(tmp_path: Path, release: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    monkeypatch.setattr(serving.fleet, "CHECK_SECONDS", -1.0)
    monkeypatch.setattr(serving.fleet, "DRAIN_SECONDS", 0.0)
    monkeypatch.setattr("serving.servers._is_free", lambda port: True)
    engine = Engine()
    yield House(tmp_path, engine, release("a"))
    engine.server.shutdown()
    engine.server.server_close()


def test_a_server_is_ready_when_this_very_release_answered(house: House) -> None:
    house.engine.release = "another"
    house.fleet.want(house.release)
    assert house.look() is ServerState.STARTING
    assert house.look() is ServerState.STARTING
    assert "another server answers" in house.fleet.health(house.release.id).why
    house.engine.release, house.engine.status = house.release.id, 500
    assert house.look() is ServerState.STARTING
    house.engine.status = 200
    assert house.look() is ServerState.READY


def test_asking_twice_starts_once_and_another_process_adopts_it(house: House) -> None:
    house.ready()
    house.fleet.want(house.release)
    house.look()
    again = house.again()
    again.want(house.release)
    assert house.look() is ServerState.READY
    assert house.host.started == [house.release.id]


def test_a_server_that_never_answers_and_keeps_ending_has_failed_and_says_why(house: House) -> None:
    house.engine.release = "nobody"
    house.fleet.want(house.release)
    house.look()
    for _ in range(4):
        house.look()
        if house.release.id in house.host.processes:
            house.host.restart(house.release.id)
    health = house.fleet.health(house.release.id)
    assert health.state is ServerState.FAILED
    assert "ValueError: no such dtype" in health.why
    assert house.host.processes == {}
    assert house.look() is ServerState.FAILED
    house.fleet.want(house.release)  # somebody has mended it
    house.engine.release = house.release.id
    house.look()
    assert house.look() is ServerState.READY


def test_a_release_that_cannot_be_served_fails_at_once(house: House) -> None:
    house.host.refuses = "the model is damaged"
    house.fleet.want(house.release)
    assert house.look() is ServerState.FAILED
    assert house.fleet.health(house.release.id).why == "the model is damaged"


def test_a_server_that_hangs_is_started_again_and_a_busy_one_is_not(house: House) -> None:
    """vllm#36451: /health answers while the engine makes no progress."""
    house.ready()
    first = house.host.processes[house.release.id]
    house.engine.status = 503
    for tokens in range(1, 8):
        house.engine.tokens = 100 * tokens
        assert house.look() is ServerState.READY
    for _ in range(3):
        house.look()
    assert house.fleet.health(house.release.id).state is ServerState.STARTING
    assert house.host.processes[house.release.id].number != first.number
    assert any("makes no progress" in alert for alert in house.alarm.raised)


def test_a_server_that_was_killed_is_seen_and_counted(house: House) -> None:
    house.ready()
    house.host.processes[house.release.id] = Process(False, 0, "backoff")
    assert house.look() is ServerState.STARTING
    house.host.restart(house.release.id)
    assert house.look() is ServerState.READY
    assert house.fleet.health(house.release.id).restarts == 1


def test_a_server_ends_only_off_the_routes_and_idle(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    house.ready()
    house.fleet.needed = lambda: {house.release.id}
    house.fleet.retire(house.release.id)
    assert house.look() is ServerState.READY
    house.fleet.needed = set
    house.engine.running = 1
    monkeypatch.setattr(serving.fleet, "DRAIN_SECONDS", 60.0)
    assert house.look() is ServerState.READY, "it has just left the routes"
    monkeypatch.setattr(serving.fleet, "DRAIN_SECONDS", 0.0)
    house.engine.running = 0
    assert house.look() is ServerState.STOPPED
    assert (house.host.processes, house.records.all()) == ({}, {})


def test_a_server_that_is_wanted_again_does_not_end(house: House) -> None:
    house.ready()
    house.fleet.retire(house.release.id)
    house.fleet.want(house.release)
    assert house.look() is ServerState.READY
    house.fleet.retire(house.release.id, after=3600)
    assert house.look() is ServerState.READY
    assert not house.fleet.due(house.release.id)


def test_a_server_wanted_while_it_ends_is_started_anew(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    house.ready()
    stop = house.host.stop

    def stopping(release: str) -> None:
        house.fleet.want(house.release)
        stop(release)

    monkeypatch.setattr(house.host, "stop", stopping)
    house.fleet.retire(house.release.id)
    assert house.look() is ServerState.STARTING
    monkeypatch.undo()
    house.look()
    assert house.host.started == [house.release.id] * 2


# ------------------------------------------------------------------------------------------- what may be served


def model(folder: Path | str, **files: bytes) -> Release:
    """Of a folder on this disk, or below an address."""
    uri = join(folder if isinstance(folder, str) else folder.as_uri(), uuid.uuid4().hex)
    with store_for(uri).publish(uri) as draft:
        for name, data in files.items():
            (draft.path / name.replace("__", ".")).write_bytes(data)
        manifest = draft.commit(Manifest(kind="model", fingerprint="f"))
    return Release.of("tiny", manifest, uri, Serve(dtype="float32", max_model_len=256), team="t", owner="o")


def test_a_whole_model_may_be_served_and_a_damaged_one_not(tmp_path: Path) -> None:
    release = model(tmp_path, model__safetensors=b"weights", config__json=b"{}")
    folder = servable(release)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "manifest.json", "model.safetensors"]
    (folder / "model.safetensors").write_bytes(b"weightz")
    with pytest.raises(BadInput, match=r"model\.safetensors differs from its hash"):
        servable(release)


def test_a_model_whose_copy_went_bad_is_fetched_again(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFIT_CACHE", str(tmp_path / "cache"))
    release = model(join(s3, tmp_path.name), model__safetensors=b"weights")
    folder = servable(release)
    (folder / "model.safetensors").write_bytes(b"weightz")
    assert servable(release) == folder
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    store_for(release.model).write(join(release.model, "model.safetensors"), b"weightz")
    (folder / "model.safetensors").write_bytes(b"weightz")
    with pytest.raises(BadInput, match=r"model\.safetensors differs from its hash.* Export it again"):
        servable(release)


def test_the_model_of_a_server_is_held_until_the_last_server_of_it_has_ended(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a controller, which runs for months, would hold every release that it ever served."""
    monkeypatch.setenv("REFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Supervisor, "_call", lambda *_, **__: None)
    (tmp_path / "run").mkdir()
    env = {"REFIT_HOME": str(tmp_path / "home"), "REFIT_SUPERVISOR_SOCKET": str(tmp_path / "run" / "socket")}
    host = SupervisorHost(Settings.from_environment(env))
    one = model(join(s3, tmp_path.name), model__safetensors=b"weights")
    two = one.model_copy(update={"id": "another"})
    folder = fetched.place() / one.digest
    left = []
    for change in (
        lambda: host.start(Record(release=one, port=1, asked_at=0)),
        lambda: host.start(Record(release=two, port=2, asked_at=0)),
        lambda: host.stop(one.id),
        lambda: host.stop(two.id),
    ):
        change()
        fetched.make_room(1 << 60)
        left.append(folder.exists())
    assert left == [True, True, True, False]
    evil = model(join(s3, tmp_path.name), model__safetensors=b"x", modeling__py=b"x")
    with pytest.raises(BadInput, match="would be executed"):
        host.start(Record(release=evil, port=3, asked_at=0))
    fetched.make_room(1 << 60)
    assert not (fetched.place() / evil.digest).exists()


def test_another_model_than_the_release_names_is_not_served(tmp_path: Path) -> None:
    one, two = (model(tmp_path, model__safetensors=data) for data in (b"one", b"two"))
    with pytest.raises(BadInput, match="another model's"):
        servable(one.model_copy(update={"model": two.model}))


@pytest.mark.parametrize("name", ["pytorch_model__bin", "modeling_evil__py", "extra__pkl"])
def test_what_would_be_executed_is_not_served(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput, match="would be executed"):
        servable(model(tmp_path, model__safetensors=b"x", **{name: b"x"}))


def test_weights_come_as_safetensors(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no \.safetensors file"):
        servable(model(tmp_path, config__json=b"{}"))


def test_the_command_line_says_everything_that_shapes_an_answer(tmp_path: Path) -> None:
    release = model(tmp_path, model__safetensors=b"x")
    line = " ".join(vllm.command("python", release, Path("/m"), 9000))
    assert f"--served-model-name tiny {release.id} --host 127.0.0.1 --port 9000" in line
    assert "--dtype float32 --max-model-len 256 --max-num-seqs 16 --generation-config vllm" in line
    assert "--middleware serving.middleware.Answers" in line
    assert "trust-remote-code" not in line
    env = vllm.environment(release, tmp_path, tmp_path / "sockets", {"REFIT_SERVER_THREADS": "2"})
    assert (env["REFIT_RELEASE"], env["OMP_NUM_THREADS"], env["HF_HUB_OFFLINE"]) == (release.id, "2", "1")
    assert env["REFIT_TOKEN_FILE"] == env["PGPASSFILE"] == ""


def test_ports_are_taken_upwards_and_not_twice(tmp_path: Path, release: Any) -> None:
    records = Records(tmp_path, 7000)
    records.put(Record(release=release("a"), port=7000, asked_at=0.0))
    assert records.free_port(lambda port: port != 7001) == 7002
