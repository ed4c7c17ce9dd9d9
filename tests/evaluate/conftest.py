"""A dataset, a model, and an engine that really speaks HTTP: it stands in for vLLM, with faults on demand."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from refit.manifest import Manifest
from refit.pipeline import load
from refit.release import Release
from refit.spec import Pipeline
from refit.store import store_for

TINY = Path(__file__).resolve().parents[2] / "dags" / "pipelines" / "tiny.yaml"
LABELS = ("refund", "delivery", "password", "invoice", "cancel", "praise")
DOMAINS = ("mail", "chat", "phone")

Body = Mapping[str, Any]
Reply = tuple[int, Any] | None
"""What a fault answers instead of the engine: status and document; None hangs up without a word."""


def right(body: Body) -> str:
    """A model that has learnt its tickets: the label stands in the question."""
    question = str(body["messages"][-1]["content"])
    return json.dumps({"intent": next((label for label in LABELS if label in question), "praise")})


@dataclass
class Engine:
    """A server of the OpenAI API for one release. `faults` are used up one a request; `answer` is the model."""

    names: list[str]
    answer: Callable[[Body], str] = right
    delay: float = 0.0
    faults: list[Reply] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)
    most_in_flight: int = 0
    port: int = 0

    def __post_init__(self) -> None:
        self._lock, self._in_flight = threading.Lock(), 0
        self._server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Engine:
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # head and body in one packet; apart, each reply waits 40 ms for a delayed acknowledgement

            def do_GET(self) -> None:
                models = [{"id": name, "object": "model"} for name in engine.names]
                self.reply(200, {"object": "list", "data": models})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                reply = engine.complete(body)
                if reply is None:
                    self.close_connection = True
                else:
                    self.reply(*reply)

            def reply(self, status: int, document: Any) -> None:
                data = document if isinstance(document, bytes) else json.dumps(document).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # a client that was killed is what some tests are about

        self._server = Server(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def stop(self) -> None:
        if self._server:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def complete(self, body: dict[str, Any]) -> Reply:
        with self._lock:
            if self.faults:
                return self.faults.pop(0)
            if body["model"] not in self.names:  # in vLLM's words
                return 404, {"error": {"message": f"The model `{body['model']}` does not exist.", "code": 404}}
            self.asked.append(body)
            self._in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self._in_flight)
        time.sleep(self.delay)
        with self._lock:
            self._in_flight -= 1
        message = {"role": "assistant", "content": self.answer(body)}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return 200, {"object": "chat.completion", "choices": [choice], "usage": {"completion_tokens": 7}}


@dataclass(frozen=True)
class World:
    """Everything an evaluation needs, below one folder."""

    folder: Path
    spec: Pipeline
    dataset: str
    model: str

    def uri(self, name: str) -> str:
        return f"file://{self.folder}/{name}"

    @property
    def release(self) -> str:
        manifest = store_for(self.model).require(self.model, "model")
        return Release.of("tiny", manifest, self.model, self.spec.serve, team="t", owner="o").id


def rows(count: int, start: int = 0) -> list[dict[str, Any]]:
    """Held-out tickets as the data stage writes them."""
    return [
        {
            "id": f"ticket-{number:05}",
            "user": f"user-{number % 40}",
            "domain": DOMAINS[number % 3],
            "label": LABELS[number % 6],
            "messages": json.dumps([
                {"role": "system", "content": "Name the intent of the ticket as JSON."},
                {"role": "user", "content": f"Ticket {number}: I write about my {LABELS[number % 6]}."},
            ]),
            "answer": json.dumps({"intent": LABELS[number % 6]}),
        }
        for number in range(start, start + count)
    ]  # fmt: skip


def publish_dataset(uri: str, records: Sequence[Mapping[str, Any]]) -> str:
    with store_for(uri).publish(uri) as draft:
        pq.write_table(pa.Table.from_pylist(list(records)), draft.path / "heldout.parquet")
        draft.commit(Manifest(kind="dataset", fingerprint="d"))
    return uri


@pytest.fixture
def world(tmp_path: Path) -> World:
    """120 tickets and a model, and the tiny line with a gate that fits them."""
    model = f"file://{tmp_path}/models/m"
    with store_for(model).publish(model) as draft:
        (draft.path / "config.json").write_text("{}")
        draft.commit(Manifest(kind="model", fingerprint="m"))
    dataset = publish_dataset(f"file://{tmp_path}/dataset", rows(120))
    return World(tmp_path, load(TINY, ["evaluate.concurrency=4"]), dataset, model)


@pytest.fixture
def engine(world: World) -> Iterator[Engine]:
    """An engine that serves the world's model."""
    engine = Engine(["tiny", world.release]).start()
    yield engine
    engine.stop()
