"""What a demo changed: one document for programs (`summary.json`), one page for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from refit import runs
from refit.job import EVENTS, read_events
from refit.store import join, store_for
from standalone.demo.timeline import Interval, job_work, moment, overhead, rollout_work, stage_seconds, task_span

SERVER_TASKS = ("first_champion.serve", "evaluate.serve_candidate", "evaluate.serve_champion")
REGISTRY_TASKS = ("first_champion.register", "promote.register", "roll_out.aliases")
"""Tasks whose own time is the stage's work: a model server that loads, a registration in MLflow."""


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A run that has ended, as the services tell it."""

    pipeline: str
    run_id: str
    folder: str
    outcome: Mapping[str, Any]
    run: Mapping[str, Any]
    tasks: Sequence[Mapping[str, Any]]
    rollout: Mapping[str, Any] | None
    requests: Mapping[str, int]
    split: int | None
    peak_memory_bytes: int
    addresses: Mapping[str, str]


def summarize(finished: Finished) -> dict[str, Any]:
    """The document `summary.json`; a part that the run did not come to is null or empty, never invented."""
    comparison = finished.outcome.get("comparison") or {}
    journal = (finished.rollout or {}).get("journal") or []
    span = Interval(moment(finished.run["start_date"]), moment(finished.run["end_date"]))
    work = [*_work_of_jobs(finished.folder, span), *_work_of_tasks(finished.tasks), *rollout_work(journal)]
    return {
        "pipeline": finished.pipeline,
        "run_id": finished.run_id,
        "outcome": finished.outcome["outcome"],
        "why": finished.outcome.get("why"),
        "champion": comparison.get("champion") or _unmeasured(finished.outcome.get("champion")),
        "candidate": comparison.get("candidate") or _unmeasured(finished.outcome.get("candidate")),
        "difference": comparison.get("difference"),
        "gate": {name: comparison.get(name) for name in ("verdict", "forced", "why")} if comparison else None,
        "verdicts": [
            {"step": entry["step"], "verdict": entry["verdict"], "why": entry["why"]}
            for entry in journal if entry.get("verdict") in ("pass", "fail")
        ],
        "requests": dict(finished.requests),
        "splits": [
            {"at": entry["at"], "weight": entry["weight"]}
            for entry in journal if entry["action"] in ("entered", "rolled_back")
        ],
        "split_read_back": finished.split,
        "seconds": stage_seconds(finished.tasks),
        "wall_seconds": round(span.end - span.start, 1),
        "overhead_ratio": round(overhead(work, span), 3),
        "peak_memory_bytes": finished.peak_memory_bytes,
        "addresses": dict(finished.addresses),
    }  # fmt: skip


def page(summary: Mapping[str, Any]) -> list[str]:
    """The same for people, a line each."""
    gate = summary["gate"] or {}
    lines = ["", f"{summary['pipeline']}: {summary['outcome']}", f"  {summary['why']}", ""]
    lines += [_score("champion", summary["champion"]), _score("candidate", summary["candidate"])]
    if summary["difference"]:
        lines.append(
            _score("difference", {"release": "", "score": summary["difference"]["value"], **summary["difference"]})
        )
    if gate.get("verdict"):
        lines.append(f"  gate         {gate['verdict']}{' (forced)' if gate.get('forced') else ''}: {gate.get('why')}")
    lines += [
        "",
        "  split        " + (" → ".join(f"{entry['weight']} %" for entry in summary["splits"]) or "no rollout"),
    ]
    lines += [f"    step {entry['step']}: {entry['verdict']}: {entry['why']}" for entry in summary["verdicts"]]
    counts = summary["requests"]
    lines += ["", f"  requests     {counts['total']} by replayed users, {counts['failed']} failed, "
              f"{counts['failed_on_killed']} taken along by a killed server"]  # fmt: skip
    spent = ", ".join(f"{stage} {seconds:.0f} s" for stage, seconds in summary["seconds"].items())
    lines += [f"  time         {summary['wall_seconds']:.0f} s: {spent}",
              f"  overhead     {summary['overhead_ratio']:.1%} of it was no stage's own work",
              f"  memory       {summary['peak_memory_bytes'] / 1e9:.1f} GB at the peak", ""]  # fmt: skip
    lines += [f"  {name:<12} {address}" for name, address in summary["addresses"].items()]
    return lines


def _work_of_jobs(folder: str, span: Interval) -> list[Interval]:
    """When the run's jobs worked; a job answered by fingerprint worked before, outside of `span`."""
    found = []
    for record in runs.noted(folder):
        uri = join(record["output"], EVENTS)
        store = store_for(uri)
        if store.exists(uri):
            found += job_work(read_events(store.read(uri).decode("utf-8", errors="replace")))
    return [interval for interval in found if interval.end > span.start and interval.start < span.end]


def _work_of_tasks(tasks: Sequence[Mapping[str, Any]]) -> list[Interval]:
    owned = (task for task in tasks if task["task_id"] in (*SERVER_TASKS, *REGISTRY_TASKS))
    return [span for task in owned if (span := task_span(task))]


def _unmeasured(release: Any) -> dict[str, Any] | None:
    return {"release": release, "score": None, "low": None, "high": None} if release else None


def _score(name: str, model: Mapping[str, Any] | None) -> str:
    if not model:
        return f"  {name:<12} –"
    if model.get("score") is None:
        return f"  {name:<12} {model['release']}  not measured in this run"
    return f"  {name:<12} {model['release']:<18}{model['score']:+.1%}  [{model['low']:+.1%}, {model['high']:+.1%}]"
