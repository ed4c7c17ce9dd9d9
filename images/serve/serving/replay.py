"""A stand-in for users: held-out items, asked through the gateway by many distinct users at a steady rate.

It is labelled as what it is wherever it appears. It behaves as a careful client does: it names its requests, sends
every sampling parameter, tries a refused connection again for five seconds, and says afterwards whether it was helped.

    total = ok + failed + failed_on_killed + under way

`failed_on_killed` counts requests that a server (or the gateway) had accepted and took with it when it was killed;
nobody could have saved those. Everything else that a user would have seen go wrong is `failed`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pyarrow.parquet as pq

from refit import files, log
from refit.errors import BadInput
from serving.settings import Settings

REFUSED_SECONDS = 5.0
ANSWER_SECONDS = 120.0
STATS_SECONDS = 1.0
FEEDBACK_BATCH = 500
FEEDBACK_SECONDS = 0.5
FEEDBACK_PATIENCE = 60.0


@dataclass(frozen=True)
class Item:
    """One question, and what a good answer says."""

    messages: list[dict[str, str]]
    answer: str
    label: str | None


@dataclass
class Stats:
    """What users met so far."""

    pipeline: str
    stand_in_for_users: bool = True
    started: float = field(default_factory=time.time)
    total: int = 0
    ok: int = 0
    failed: int = 0
    failed_on_killed: int = 0
    retried: int = 0
    late: int = 0
    resolved: int = 0
    feedback: int = 0
    feedback_lost: int = 0
    by_release: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def fail(self, why: str, *, killed: bool = False) -> None:
        """Count a request that went wrong, and keep the first few reasons."""
        if killed:
            self.failed_on_killed += 1
        else:
            self.failed += 1
        if len(self.failures) < 20:
            self.failures.append(why)


def replay(arguments: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    """Run the replay that the command line asks for; returns its counts."""
    items = read_items(arguments.items)
    users = Users(arguments, settings, items)
    log.event("replay", pipeline=arguments.pipeline, items=len(items), users=arguments.users, rate=arguments.rate,
              note="a stand-in for users")  # fmt: skip
    return asyncio.run(users.run())


def read_items(path: Path) -> list[Item]:
    """The items of a heldout.parquet.

    Raises:
        BadInput: it is not one, or it is empty.
    """
    try:
        rows = pq.read_table(path, columns=["messages", "answer", "label"]).to_pylist()
        items = [Item(json.loads(row["messages"]), row["answer"] or "", row["label"]) for row in rows]
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(
            f"{path}: cannot be read as held-out items: {error}. Give a dataset's heldout.parquet."
        ) from error
    if not items:
        raise BadInput(f"{path}: holds no items.")
    return items


def is_resolved(item: Item, answer: str, key: str | None) -> bool:
    """Whether an answer says what the item's own answer says: the same label, or the same text where there is none."""
    expected = _object(item.answer)
    if key is None and expected is not None and item.label is not None:
        key = next((name for name, value in expected.items() if value == item.label), None)
    if key is None:
        return answer.strip() == item.answer.strip()
    said = _object(answer)
    wanted = item.label if item.label is not None else (expected or {}).get(key)
    return said is not None and wanted is not None and said.get(key) == wanted


def _object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def turns(users: int, rng: random.Random) -> Iterator[int]:
    """Users in a shuffled order, again and again: everybody has asked once before anybody asks twice."""
    order = list(range(users))
    while True:
        rng.shuffle(order)
        yield from order


class Users:
    """Everybody who asks."""

    def __init__(self, arguments: argparse.Namespace, settings: Settings, items: list[Item]) -> None:
        self._given = arguments
        self._gateway = (arguments.gateway or settings.gateway).rstrip("/")
        self._recorder = (arguments.recorder or settings.recorder).rstrip("/")
        self._token = settings.token()
        self._items = items
        self._random = random.Random(arguments.seed)
        self._turns = turns(arguments.users, self._random)
        self._said: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.stats = Stats(arguments.pipeline)

    async def run(self) -> dict[str, Any]:
        """Ask until it is time to stop; returns the counts."""
        limits = httpx.Limits(
            max_connections=self._given.concurrency, max_keepalive_connections=self._given.concurrency
        )
        async with httpx.AsyncClient(
            timeout=httpx.Timeout(ANSWER_SECONDS, connect=5.0), limits=limits, trust_env=False
        ) as client:
            asked = asyncio.Event()
            helpers = [asyncio.create_task(self._feedback(client, asked)), asyncio.create_task(self._report())]
            try:
                await self._ask_all(client)
            finally:
                asked.set()
                await helpers[0]
                helpers[1].cancel()
                self._write_stats()
        return self._facts()

    async def _ask_all(self, client: httpx.AsyncClient) -> None:
        # Open loop: a slow server does not make users come more slowly, up to the limit of requests under way.
        room, tasks = asyncio.Semaphore(self._given.concurrency), set()
        start, over = time.monotonic(), self._over()
        number = 0
        while not over():
            due = start + number / self._given.rate
            wait = due - time.monotonic()
            if wait > 0:
                await asyncio.sleep(min(wait, 0.2))
                continue
            if room.locked():
                self.stats.late += 1
            await room.acquire()
            task = asyncio.create_task(self._ask(client))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            task.add_done_callback(lambda _: room.release())
            number += 1
        if tasks:
            await asyncio.wait(tasks)

    def _over(self) -> Callable[[], bool]:
        if self._given.seconds is not None:
            end = time.monotonic() + self._given.seconds
            return lambda: time.monotonic() > end
        until: Path = self._given.until_file
        return until.exists

    async def _ask(self, client: httpx.AsyncClient) -> None:
        item = self._random.choice(self._items)
        request = str(uuid4())
        headers = {"x-user-id": f"user-{next(self._turns)}", "x-request-id": request}
        self.stats.total += 1
        answer = await self._answer(client, item, headers)
        if answer is None:
            return
        resolved = is_resolved(item, answer, self._given.label_key)
        self.stats.ok += 1
        self.stats.resolved += resolved
        self._said.put_nowait({"request_id": request, "resolved": resolved})

    async def _answer(self, client: httpx.AsyncClient, item: Item, headers: dict[str, str]) -> str | None:
        url = f"{self._gateway}/{self._given.pipeline}/v1/chat/completions"
        body = {
            "model": self._given.pipeline, "messages": item.messages, "max_tokens": self._given.max_tokens,
            "temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
            "presence_penalty": 0.0, "frequency_penalty": 0.0, "seed": 1, "n": 1, "stream": False,
        }  # fmt: skip
        deadline = time.monotonic() + REFUSED_SECONDS
        while True:
            try:
                answer = await client.post(url, json=body, headers=headers)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                # Refused before anything was sent: a careful client tries again.
                if time.monotonic() > deadline:
                    self.stats.fail(f"refused for {REFUSED_SECONDS:.0f} s: {error}")
                    return None
                self.stats.retried += 1
                await asyncio.sleep(0.2)
                continue
            except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError) as error:
                self.stats.fail(f"cut off: {error!r}", killed=True)
                return None
            except httpx.HTTPError as error:
                self.stats.fail(repr(error))
                return None
            return self._text(answer)

    def _text(self, answer: httpx.Response) -> str | None:
        if answer.status_code != 200:
            # Envoy's words for a server that took the request and went away with it.
            killed = answer.status_code == 503 and "reset reason: connection termination" in answer.text
            self.stats.fail(f"{answer.status_code}: {answer.text[:200]}", killed=killed)
            return None
        release = answer.headers.get("x-refit-release", "")
        self.stats.by_release[release] = self.stats.by_release.get(release, 0) + 1
        try:
            return str(answer.json()["choices"][0]["message"]["content"] or "")
        except (ValueError, KeyError, IndexError, TypeError):
            self.stats.fail(f"no completion: {answer.text[:200]}")
            return None

    # ---------------------------------------------------------------------------------------------- what they say

    async def _feedback(self, client: httpx.AsyncClient, asked: asyncio.Event) -> None:
        headers = {"Authorization": f"Bearer {self._token}"}
        patience: float | None = None
        batch: list[dict[str, Any]] = []
        while True:
            while len(batch) < FEEDBACK_BATCH and not self._said.empty():
                batch.append(self._said.get_nowait())
            if not batch and asked.is_set():
                return
            if batch:
                try:
                    answer = await client.post(f"{self._recorder}/v1/feedback", json=batch, headers=headers)
                    answer.raise_for_status()
                    self.stats.feedback += len(batch)
                    batch = []
                except httpx.HTTPError as error:
                    patience = patience or time.monotonic() + FEEDBACK_PATIENCE
                    if asked.is_set() and time.monotonic() > patience:
                        self.stats.feedback_lost += len(batch)
                        log.event("replay", state="feedback lost", events=len(batch), why=repr(error))
                        return
            if len(batch) < FEEDBACK_BATCH:
                await asyncio.sleep(FEEDBACK_SECONDS)

    async def _report(self) -> None:
        while True:
            self._write_stats()
            await asyncio.sleep(STATS_SECONDS)

    def _write_stats(self) -> None:
        if self._given.stats:
            files.write(self._given.stats, json.dumps(self._facts(), indent=1).encode())

    def _facts(self) -> dict[str, Any]:
        self.stats.seconds = time.time() - self.stats.started
        return asdict(self.stats)
