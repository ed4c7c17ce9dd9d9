"""kill -9 of what serves and judges while half of the users meet a candidate: none of them notices."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from standalone.demo.users import StandIn
from tests.scenarios.house import House, Run, until


@dataclass
class Canary:
    """A rollout that stays at 50 % for a while, with users."""

    run: Run
    users: StandIn


@pytest.fixture(scope="module")
def canary(house: House, first_run: dict[str, Any]) -> Iterator[Canary]:
    run = house.start(rollout__steps="[50, 100]", rollout__min_seconds="150", rollout__max_latency_ratio="20")
    users = house.users("canary")
    users.ask(run.heldout(), rate=6)
    try:
        run.at_share(50)
        yield Canary(run, users)
    finally:
        users.leave()


def failed(canary: Canary) -> int:
    return canary.users.counts()["failed"]


def answered(canary: Canary, more: int) -> None:
    """Wait until users got so many further answers."""
    before = canary.users.counts()["total"]
    until(lambda: canary.users.counts()["total"] >= before + more, 120, f"{more} more requests")


def test_the_challengers_server_is_killed(house: House, canary: Canary) -> None:
    """First, while the step is young: a new server takes as long to load as the step lasts."""
    name = f"server-{house.line()['challenger']['id']}"
    old = house.pid(name)
    os.kill(old, signal.SIGKILL)
    answered(canary, 20)
    assert failed(canary) == 0
    until(lambda: house.refit("status")["programs"][name]["pid"] not in (None, 0, old), 120, "another server process")


def test_the_gateway_is_killed(house: House, canary: Canary) -> None:
    """Refused connections are tried again for five seconds; what it had accepted is counted apart."""
    house.kill("gateway")
    answered(canary, 20)
    assert failed(canary) == 0
    assert house.split() == 50


def test_the_controller_is_killed(house: House, canary: Canary) -> None:
    house.kill("controller")
    answered(canary, 20)
    assert failed(canary) == 0
    assert house.line()["rollout"]["state"] == "running"
    assert house.split() == 50


def test_postgres_is_killed(house: House, canary: Canary) -> None:
    house.kill("postgres")
    answered(canary, 20)
    assert failed(canary) == 0
    assert house.line()["rollout"]["state"] == "running"


def test_and_the_rollout_ends_well(house: House, canary: Canary) -> None:
    outcome = canary.run.end()
    assert outcome["outcome"] == "promoted", outcome["why"]
    assert house.line()["champion"]["id"] == outcome["candidate"]
    canary.users.leave()
    counts = canary.users.counts()
    assert counts["failed"] == 0
    assert counts["total"] > 300
    entries = [entry["sequence"] for entry in house.controller.rollout(outcome["rollout"]["id"])["journal"]]
    assert entries == list(range(1, len(entries) + 1))
