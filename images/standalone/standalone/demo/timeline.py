"""Where the time of a run went: stages' own work, and what orchestration added to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

STAGES = ("prepare_data", "first_champion", "train", "evaluate", "promote", "roll_out")


@dataclass(frozen=True, order=True)
class Interval:
    """From when to when, in seconds since the epoch."""

    start: float
    end: float


def covered(intervals: Iterable[Interval], within: Interval) -> float:
    """Seconds of `within` that at least one interval covers."""
    total, reached = 0.0, within.start
    for interval in sorted(intervals):
        start, end = max(interval.start, reached), min(interval.end, within.end)
        if end > start:
            total += end - start
            reached = end
    return total


def overhead(work: Iterable[Interval], run: Interval) -> float:
    """The share of a run's wall time in which no stage did its own work; 0 for a run of no length."""
    wall = run.end - run.start
    return 1 - covered(work, run) / wall if wall > 0 else 0.0


def job_work(events: Sequence[Mapping[str, Any]]) -> list[Interval]:
    """When a job ran, from what it wrote down: each attempt from its `running` to what ended it."""
    found, since = [], None
    for event in events:
        at = datetime.fromisoformat(event["at"]).timestamp()
        if event["state"] == "running":
            since = at
        elif since is not None:
            found.append(Interval(since, at))
            since = None
    return found


def rollout_work(journal: Sequence[Mapping[str, Any]]) -> list[Interval]:
    """When a rollout measured: each step from its entry to what ended it."""
    found, since = [], None
    for entry in journal:
        at = moment(entry["at"])
        if entry["action"] == "entering":
            since = at
        elif since is not None and (entry["verdict"] == "pass" or entry["action"] == "rolled_back"):
            found.append(Interval(since, at))
            since = None
    return found


def stage_seconds(tasks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Wall seconds from a stage's first task to its last, for the stages that ran; tasks as Airflow's REST has them."""
    seconds = {}
    for stage in STAGES:
        spans = [span for task in tasks if task["task_id"].startswith(f"{stage}.") and (span := task_span(task))]
        if spans:
            seconds[stage] = round(max(s.end for s in spans) - min(s.start for s in spans), 1)
    return seconds


def task_span(task: Mapping[str, Any]) -> Interval | None:
    """When a task ran; None where it did not (skipped, not yet)."""
    if not task.get("start_date") or not task.get("end_date") or task.get("state") == "skipped":
        return None
    return Interval(moment(task["start_date"]), moment(task["end_date"]))


def moment(value: str | float | datetime) -> float:
    """A time as seconds since the epoch, however it was written."""
    if isinstance(value, datetime):
        return value.timestamp()
    if isinstance(value, str):
        return datetime.fromisoformat(value.replace("Z", "+00:00")).timestamp()
    return float(value)
