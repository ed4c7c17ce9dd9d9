"""One stack and one trained tiny line for all scenarios. Each starts at the stage that it is about."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from refit.proc import STACK_TAG, find_tagged
from tests.scenarios.house import House, until


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.scenarios)


@pytest.fixture(scope="session")
def house() -> Iterator[House]:
    # A short path of its own: sockets have short names, and pytest keeps its folders of former runs.
    with tempfile.TemporaryDirectory(prefix="refit-") as folder:
        house = House(Path(folder))
        try:
            house.refit("up", "--wait", "600")
            yield house
        finally:
            house.refit("down", "--grace", "2")
            assert find_tagged(str(house.home.path), variable=STACK_TAG) == []


@pytest.fixture(scope="session")
def first_run(house: House) -> dict[str, Any]:
    """A first run from nothing: it makes the first champion, beats it, and takes all users."""
    run = house.start(fresh=False)
    users = house.users("first")
    until(lambda: house.line()["champion"], 600, "the first champion serves")
    users.ask(run.heldout(), rate=1)
    try:
        until(lambda: house.line()["rollout"], 600, "the first rollout")
        users.ask(run.heldout(), rate=10)
        outcome = run.end()
    finally:
        users.leave()
    return {**outcome, "counts": users.counts()}
