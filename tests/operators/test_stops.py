"""However a training is stopped, it gets the time to write its checkpoint that its trainer reckons with."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from operators import pods
from operators.backends.local import LocalBackend
from operators.triggers import JobTrigger
from refit.job import Job

Fire = Callable[..., dict[str, Any]]


@pytest.fixture
def graces(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What jobs were given when they were really stopped."""
    told: list[float] = []
    stop = LocalBackend.stop

    def noted(backend: LocalBackend, output: str, *, grace: float = -1.0) -> bool:
        told.append(grace)
        return stop(backend, output, grace=grace)

    monkeypatch.setattr(LocalBackend, "stop", noted)
    return told


def watched(job: Job, *, hours: float = 1.0, heartbeat_timeout: float = 900.0) -> JobTrigger:
    now = time.time()
    return JobTrigger(
        job=job.uri, backend="local", run_id="manual__1", heartbeat_timeout=heartbeat_timeout, since=now,
        deadline=now + 3600 * hours, poll_seconds=0.1,
    )  # fmt: skip


@pytest.mark.parametrize(("kind", "grace"), [("train", 33), ("trial", 33), ("evaluate", pods.STOP_SECONDS)])
def test_a_job_that_is_late_or_silent_or_ended_by_hand_has_its_own_time_to_end(
    make_job: Callable[..., Job], tmp_path: Path, backend: LocalBackend, fire: Fire, graces: list[float], kind: str,
    grace: int,
) -> None:  # fmt: skip
    """A training that is killed in the middle of its last save goes back to the one before."""
    made = make_job(("wait_for", str(tmp_path / "never")), kind=kind)
    train = made.spec.train
    slow = train.model_copy(update={"checkpoint": train.checkpoint.model_copy(update={"grace_seconds": 32.5})})
    job = made.model_copy(update={"spec": made.spec.model_copy(update={"train": slow})})
    ends: list[tuple[str, Callable[[], object]]] = [
        ("TimedOut", lambda: fire(watched(job, hours=0))["error"]),
        ("Hung", lambda: fire(watched(job, heartbeat_timeout=0.5))["error"]),
        ("None", lambda: asyncio.run(watched(job).on_kill())),
    ]
    for how, end in ends:
        backend.submit(job)
        assert str(end()) == how
        assert not backend.adopt(job.output)
    assert graces == [grace] * len(ends)
