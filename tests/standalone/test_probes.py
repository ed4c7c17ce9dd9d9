"""A probe says ready only when there is reason to."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from standalone import probes
from standalone.home import Home
from standalone.ports import free_ports

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def health(status: str, seconds_ago: float | None) -> dict[str, dict[str, str | None]]:
    beat = None if seconds_ago is None else (NOW - timedelta(seconds=seconds_ago)).isoformat()
    return {"scheduler": {"status": status, "latest_scheduler_heartbeat": beat}}


def problem(document: dict[str, dict[str, str | None]], started_ago: float = 3600) -> str | None:
    return probes.component_problem(document, "scheduler", NOW.timestamp() - started_ago, NOW)


def test_a_fresh_heartbeat_of_a_healthy_component_is_ready() -> None:
    assert problem(health("healthy", 3)) is None


@pytest.mark.parametrize(
    ("document", "why"),
    [
        (health("unhealthy", 3), "unhealthy"),
        (health("healthy", None), "no heartbeat"),
        (health("healthy", 300), "300 s old"),
        ({}, "nothing"),
    ],
)
def test_anything_else_is_not(document: dict[str, dict[str, str | None]], why: str) -> None:
    assert why in str(problem(document))


def test_the_heartbeat_of_the_process_before_does_not_count() -> None:
    assert "no heartbeat yet" in str(problem(health("healthy", 20), started_ago=10))


def test_a_server_that_is_not_there_is_not_ready_and_says_so(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.make_folders()
    home.make_secrets()
    ports = free_ports()
    answers = {name: probe(home, ports, 0.0) for name, probe in probes.PROBES.items()}
    assert [name for name, answer in answers.items() if answer is None] == []
    assert "refused" in str(answers["postgres"])
