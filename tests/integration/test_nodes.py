"""A slow machine in a real PostgreSQL: avoided for a while, and left by the job that found it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from operators import backends, nodes
from operators.backends import Backend, Phase, Standing
from operators.errors import NodeSlow, restore
from operators.triggers import JobTrigger
from refit.job import Job, JobRun
from refit.pipeline import validate
from refit.sql import query
from refit.states import State

pytestmark = pytest.mark.integration


class Cluster(Backend):
    """Pods whose names are known; what runs in them is not the subject here."""

    name = "cluster"

    def __init__(self, placed: dict[str, str]) -> None:
        self.placed = placed
        self.stopped: list[str] = []

    def submit(self, job: Job, pod: Callable[[], Any] | None = None) -> bool:
        return True

    def adopt(self, output: str) -> bool:
        return True

    def state(self, output: str) -> Standing:
        return Standing(Phase.RUNNING)

    def logs(self, output: str, cursor: str = "") -> tuple[list[str], str]:
        return [], cursor

    def end_of_log(self, output: str) -> str:
        return ""

    def stop(self, output: str, *, grace: float = 20.0) -> bool:
        self.stopped.append(output)
        return True

    def node_of(self, output: str, host: str) -> str | None:
        return self.placed.get(host)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    spec = validate(
        {
            "name": "line", "title": "A line", "team": "team", "owner": "owner@example.com",
            "data": {"sources": [{"name": "a", "uri": "cache://data/a.jsonl"}]},
            "train": {"base": "cache://models/base"},
        },
        "test",
    )  # fmt: skip
    made = Job.build("train", spec, store=tmp_path.as_uri(), output=(tmp_path / "out").as_uri(), attempt=2)
    made.save()
    return made


def slow(job: Job, tmp_path: Path, host: str, *, over: bool = False) -> None:
    reason = f"slow rank 1 ({host}) at step 40: 2.1 times the others"
    JobRun(job, tmp_path / "out").event(State.RUNNING, reason, slow_rank={"rank": 1, "host": host, "over": over})


@pytest.fixture
def watched(job: Job, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, Cluster]]:
    def look(**placed: str) -> tuple[Any, Cluster]:
        cluster = Cluster({name.replace("_", "-"): node for name, node in placed.items()})
        monkeypatch.setattr(backends, "named", lambda _: cluster)
        trigger = JobTrigger(
            job=job.uri, backend="cluster", run_id="r", heartbeat_timeout=900.0, since=time.time(),
            deadline=time.time() + 60,
        )  # fmt: skip
        return trigger.look(), cluster

    return look


def test_a_job_on_a_slow_node_is_stopped_and_goes_on_elsewhere(
    database: psycopg.Connection[Any], job: Job, tmp_path: Path, watched: Callable[..., tuple[Any, Cluster]]
) -> None:
    slow(job, tmp_path, "pod-1")
    event, cluster = watched(pod_0="node-3", pod_1="node-7")
    error = restore(event)
    assert isinstance(error, NodeSlow)
    assert error.retry
    assert "node node-7: slow rank 1" in str(error)
    assert cluster.stopped == [job.output]
    assert nodes.quarantined() == ["node-7"]


def test_a_job_that_comes_back_to_a_slow_node_stays_there(
    database: psycopg.Connection[Any], job: Job, tmp_path: Path, watched: Callable[..., tuple[Any, Cluster]]
) -> None:
    """One node, or all of them in quarantine: it would be stopped until its failures are used up."""
    slow(job, tmp_path, "pod-1")
    event, cluster = watched(pod_1="node-7")
    assert (restore(event).retry, cluster.stopped) == (True, [job.output])
    slow(job, tmp_path, "pod-1")
    event, cluster = watched(pod_1="node-7")
    assert (event, cluster.stopped, nodes.quarantined()) == (None, [], ["node-7"])
    slow(job, tmp_path, "pod-1")
    event, cluster = watched(pod_1="node-8")
    assert (restore(event).retry, cluster.stopped) == (True, [job.output]), "another one it leaves"


def test_a_machine_that_is_the_only_one_is_marked_and_its_job_goes_on(
    database: psycopg.Connection[Any], job: Job, tmp_path: Path, watched: Callable[..., tuple[Any, Cluster]]
) -> None:
    slow(job, tmp_path, "here")
    event, cluster = watched()
    assert (event, cluster.stopped) == (None, [])
    assert nodes.quarantined() == ["here"]
    assert database.execute(b"SELECT source, level FROM alerts").fetchall() == [("node", "suspicious")]


def test_what_an_earlier_try_found_or_is_over_moves_nobody(
    database: psycopg.Connection[Any], job: Job, tmp_path: Path, watched: Callable[..., tuple[Any, Cluster]]
) -> None:
    slow(job.model_copy(update={"attempt": 1}), tmp_path, "pod-1")
    slow(job, tmp_path, "pod-1")
    slow(job, tmp_path, "pod-1", over=True)
    event, cluster = watched(pod_1="node-7")
    assert (event, cluster.stopped, nodes.quarantined()) == (None, [], [])


def test_without_a_database_nobody_is_moved_for_the_next_try_would_come_back(
    job: Job, tmp_path: Path, watched: Callable[..., tuple[Any, Cluster]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REFIT_DATABASE_URL", raising=False)
    slow(job, tmp_path, "pod-1")
    event, cluster = watched(pod_1="node-7")
    assert (event, cluster.stopped, nodes.quarantined()) == (None, [], [])


def test_a_quarantine_ends_by_itself_or_by_hand(
    database: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("node-3", "node-7"):
        assert nodes.quarantine(name, "slow", "train-1")
    assert nodes.quarantined() == ["node-3", "node-7"]
    database.execute(query("release_node").encode(), {"name": "node-3"})
    database.execute(b"UPDATE nodes SET until = now() WHERE name = 'node-7'")
    database.commit()
    assert nodes.quarantined() == []
    assert nodes.quarantine("node-7", "slow again", "train-2")
    assert nodes.quarantined() == ["node-7"]
