"""The server that is examined: is it the right one, and what does it answer?

A request names the release, not the pipeline: a server that was replaced meanwhile refuses it instead of answering
for another. Everything that can go away and come back (a refused connection, a 503) is tried again until `patience`
is over; what the server refuses for the question's own sake (too long) is an answer too: users would get the same.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx

from evaluator.exam import Item
from refit import log
from refit.errors import ServerUnavailable
from refit.spec import Sampling

REFUSED = frozenset({400, 413, 422})
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
COMPLAINT_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came back for an item: the raw text, or the reason why the server refused. Seconds include its queue."""

    set: str
    id: str
    text: str
    seconds: float
    tokens: int
    finish: str
    refused: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """The item's key."""
        return self.set, self.id


class Server:
    """An OpenAI-compatible server at `url` (without /v1) that should serve `release` for `pipeline`."""

    def __init__(self, url: str, *, pipeline: str, release: str, sampling: Sampling, concurrency: int, patience: float):
        self._names = (pipeline, release)
        self._release = release
        # Every parameter, with every request: what is left out would come from the model's own generation_config.json.
        self._sampling = {**sampling.model_dump(), "n": 1, "stream": False}
        self._patience = patience
        self._complained = -math.inf
        self._client = httpx.AsyncClient(
            base_url=url.rstrip("/").removesuffix("/v1"),
            timeout=httpx.Timeout(patience, connect=5.0),
            limits=httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
            trust_env=False,  # a proxy for the outside world has no business between two of our own processes
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def verify(self) -> None:
        """Check that the server serves the release.

        Raises:
            ServerUnavailable: it does not answer in time, or serves something else.
        """
        response = await self._patiently("GET", "/v1/models")
        if response.status_code != 200:
            raise ServerUnavailable(f"{self._client.base_url}v1/models: {response.status_code}: {_reason(response)}")
        served = [str(model.get("id")) for model in _object(response).get("data", [])]
        missing = [name for name in self._names if name not in served]
        if missing:
            raise ServerUnavailable(
                f"{self._client.base_url}: serves {', '.join(served) or 'nothing'}, not {' and '.join(missing)}. "
                "Start the release's own server (--served-model-name PIPELINE RELEASE), or correct the address."
            )

    async def ask(self, item: Item) -> Answer:
        """One item's answer.

        Raises:
            ServerUnavailable: no answer in time, one that is not a completion, or the release is not served any more.
        """
        body = {**self._sampling, "model": self._release, "messages": [dict(message) for message in item.messages]}
        response = await self._patiently("POST", "/v1/chat/completions", body)
        seconds = response.elapsed.total_seconds()  # of the try that was answered
        if response.status_code in REFUSED:
            return Answer(
                set=item.set, id=item.id, text="", seconds=seconds, tokens=0, finish="refused",
                refused=_reason(response),
            )  # fmt: skip
        if response.status_code != 200:
            raise ServerUnavailable(f"{self._client.base_url}: {response.status_code}: {_reason(response)}")
        document = _object(response)
        try:
            choice = document["choices"][0]
            return Answer(
                set=item.set, id=item.id, text=_storable(choice["message"]["content"] or ""), seconds=seconds,
                tokens=int((document.get("usage") or {}).get("completion_tokens", 0)),
                finish=str(choice.get("finish_reason")),
            )  # fmt: skip
        except (KeyError, IndexError, TypeError) as error:
            raise ServerUnavailable(f"{self._client.base_url}: not a completion: {response.text[:200]}") from error

    async def _patiently(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> httpx.Response:
        deadline, pause = time.monotonic() + self._patience, FIRST_PAUSE
        while True:
            try:
                response = await self._client.request(method, path, json=body)
                if response.status_code < 500 and response.status_code not in (408, 429):
                    return response
                trouble = f"{response.status_code}: {_reason(response)}"
            except httpx.TransportError as error:
                trouble = f"{type(error).__name__}: {error}"
            if time.monotonic() + pause > deadline:
                raise ServerUnavailable(
                    f"{self._client.base_url}: no answer in {self._patience:g} s ({trouble}). "
                    "Look at the server's log; the answers so far are kept, and the next try goes on from them."
                )
            if time.monotonic() - self._complained > COMPLAINT_SECONDS:  # every request in flight has the same trouble
                self._complained = time.monotonic()
                log.event("retry", path=path, trouble=trouble, pause=pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)


def _storable(text: str) -> str:
    # Half a surrogate pair is legal in JSON and in no file: a model cut off inside an emoji sends one.
    return text.encode("utf-8", "replace").decode()


def _object(response: httpx.Response) -> dict[str, Any]:
    try:
        document = response.json()
    except ValueError as error:
        raise ServerUnavailable(f"{response.url}: not JSON: {response.text[:200]}") from error
    return document if isinstance(document, dict) else {}


def _reason(response: httpx.Response) -> str:
    try:
        document = response.json()
        message = document.get("error", document) if isinstance(document, dict) else document
        return str(message.get("message", message) if isinstance(message, dict) else message)[:300]
    except ValueError:
        return response.text[:300]
