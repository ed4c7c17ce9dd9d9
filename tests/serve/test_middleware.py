"""What runs inside a model server: it says who answers, it keeps answers, and it is in nobody's way."""

from __future__ import annotations

import ast
import asyncio
import json
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest

import serving.middleware
from serving.middleware import Answers, answer_in, append

CHAT = json.dumps({"choices": [{"message": {"content": "hello"}}]}).encode()
STREAM = b'data: {"choices":[{"delta":{"role":"assistant"}}]}\n\ndata: {"choices":[{"delta":{"content":"hel"}}]}\n\n'


async def ask(middleware: Answers, headers: dict[str, str]) -> list[MutableMapping[str, Any]]:
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    await middleware({"type": "http", "headers": encoded}, receive, send)
    return sent


async def server(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
    await send({"type": "http.response.body", "body": CHAT[:10], "more_body": True})
    await send({"type": "http.response.body", "body": CHAT[10:]})


@pytest.fixture
def middleware(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answers:
    monkeypatch.setenv("REFIT_RELEASE", "r" * 16)
    monkeypatch.setenv("REFIT_SPOOL", str(tmp_path))
    return Answers(server)


MARKED = {"x-request-id": "1", "x-refit-rollout": "tiny-1", "host": "models:8000"}


def test_every_answer_says_which_release_gave_it_and_passes_unchanged(middleware: Answers) -> None:
    sent = asyncio.run(ask(middleware, {}))
    assert sent[0]["headers"] == [(b"a", b"b"), (b"x-refit-release", b"r" * 16)]
    assert [message["body"] for message in sent[1:]] == [CHAT[:10], CHAT[10:]]


def test_answers_are_kept_only_while_a_rollout_is_measured(middleware: Answers) -> None:
    asyncio.run(ask(middleware, {"x-request-id": "1"}))
    assert middleware.spool is not None
    assert not middleware.spool.exists()
    asyncio.run(ask(middleware, MARKED))
    asyncio.run(ask(middleware, {**MARKED, "host": "models-shadow:8000"}))
    kept = [json.loads(line) for line in middleware.spool.read_text().splitlines()]
    assert [(line["shadow"], line["answer"], line["status"], line["rollout"]) for line in kept] == [
        (False, "hello", 200, "tiny-1"), (True, "hello", 200, "tiny-1"),
    ]  # fmt: skip
    assert middleware.spool.stat().st_mode & 0o777 == 0o600


def test_a_full_disk_loses_a_line_and_never_a_request(middleware: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, line: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(serving.middleware, "append", full)
    assert len(asyncio.run(ask(middleware, MARKED))) == 3


def test_a_server_that_breaks_is_recorded_and_breaks_as_before(middleware: Answers) -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("out of memory")

    middleware.app = broken
    with pytest.raises(RuntimeError, match="out of memory"):
        asyncio.run(ask(middleware, MARKED))
    assert middleware.spool is not None
    assert json.loads(middleware.spool.read_text())["status"] == 0


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        (CHAT, "hello"),
        (b'{"choices": [{"text": "plain"}]}', "plain"),
        (STREAM + b'data: {"choices":[{"delta":{"content":"lo"}}]}\n\ndata: [DONE]\n\n', "hello"),
        (STREAM + b'data: {"choices":[{"del', "hel"),
        (b"not json", "not json"),
        (b'{"error": 1}', '{"error": 1}'),
        (b"", ""),
        (json.dumps({"choices": [{"text": "x" * 9000}]}).encode(), "x" * 2000),
    ],
)
def test_the_text_of_an_answer_is_found_however_it_comes(body: bytes, answer: str) -> None:
    assert answer_in(body) == answer


def test_the_spool_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving.middleware, "FILE_BYTES", 100)
    for number in range(100):
        append(tmp_path / "answers", b"%030d" % number)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["answers.1"]
    assert (tmp_path / "answers.1").stat().st_size <= 131


def test_it_needs_nothing_but_the_standard_library() -> None:
    """It is imported by vLLM, in a venv that has none of our packages."""
    tree = ast.parse(Path(serving.middleware.__file__).read_text())
    roots = {
        alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }
    roots |= {str(node.module).split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert roots <= sys.stdlib_module_names
