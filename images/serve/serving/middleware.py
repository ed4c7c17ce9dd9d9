"""What runs inside a model server: says which release answers, and keeps answers while a rollout is measured.

vLLM loads it with `--middleware serving.middleware.Answers`. Standard library only, since it lives in the compute venv.

Every answer gets the header `x-refit-release`. Requests that the gateway marked with a rollout are spooled, one JSON
line each, to `answers-<release>.jsonl`; the recorder pairs shadow answers with the champion's by request id. Two files
of 8 MiB are kept at most.

What it does not do: change, delay or buffer what is sent. A full disk loses a line in the spool, never a request.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

RELEASE, SPOOL = "REFIT_RELEASE", "REFIT_SPOOL"
ANSWER_CHARACTERS = 2_000
BODY_BYTES = 64 << 10
FILE_BYTES = 8 << 20


class Answers:
    """ASGI middleware around a model server."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.release = os.environ.get(RELEASE, "")
        folder = os.environ.get(SPOOL)
        self.spool = Path(folder) / f"answers-{self.release}.jsonl" if folder else None

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Pass one request through."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        keep = self.spool is not None and bool(headers.get("x-refit-rollout"))
        seen = _Seen()

        async def passing(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (b"x-refit-release", self.release.encode())]
            if keep:
                seen.look(message)
            await send(message)

        try:
            await self.app(scope, receive, passing)
        finally:
            if keep:
                self._record(headers, seen)

    def _record(self, headers: dict[str, str], seen: _Seen) -> None:
        line = {
            "request_id": headers.get("x-request-id", ""),
            "rollout": headers["x-refit-rollout"],
            "release": self.release,
            # Envoy appends this to the host of a mirrored request.
            "shadow": headers.get("host", "").partition(":")[0].endswith("-shadow"),
            "status": seen.status,
            "seconds": time.monotonic() - seen.started,
            "first_byte": seen.first_byte,
            "answer": answer_in(bytes(seen.body)),
            "at": time.time(),
        }
        try:
            append(self.spool, json.dumps(line, ensure_ascii=False).encode())  # type: ignore[arg-type]
        except OSError:
            return  # the user has the answer, and that is what counts


class _Seen:
    """What passed by of one answer."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.status = 0
        self.first_byte: float | None = None
        self.body = bytearray()

    def look(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["type"] == "http.response.body" and message.get("body"):
            if self.first_byte is None:
                self.first_byte = time.monotonic() - self.started
            self.body += message["body"][: BODY_BYTES - len(self.body)]


def append(path: Path, line: bytes) -> None:
    """Append a line with one write; the file makes room for a new one when it is full."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, line + b"\n")
        full = os.fstat(descriptor).st_size > FILE_BYTES
    finally:
        os.close(descriptor)
    if full:
        os.replace(path, path.with_name(path.name + ".1"))


def answer_in(body: bytes) -> str:
    """The text that a completion holds, whole or as a stream of events; the body itself where it is neither."""
    text = body.decode("utf-8", errors="replace")
    if text.startswith("data:"):
        parts = [_text_of(line[5:].strip()) for line in text.splitlines() if line.startswith("data:")]
        return "".join(part for part in parts if part is not None)[:ANSWER_CHARACTERS]
    found = _text_of(text)
    return (text if found is None else found)[:ANSWER_CHARACTERS]


def _text_of(text: str) -> str | None:
    try:
        choice = json.loads(text)["choices"][0]
        said = choice.get("message") or choice.get("delta") or choice
        return str(said.get("content") or said.get("text") or "")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return None
