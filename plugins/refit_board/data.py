"""What the board shows, gathered from who is right about it: the controller about the live split, Postgres about
history, a job's status.json about its progress. What is away leaves a hole and a sentence, not an error page.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from operators import projection
from operators.controller import Controller
from operators.links import page_of
from refit import progress
from refit.errors import RefitError
from refit.pipeline import load
from refit.sql import query

Rows = list[dict[str, Any]]
Allowed = Callable[[str], bool]


def board(*, readable: Allowed, editable: Allowed) -> dict[str, Any]:
    """The whole page as one document."""
    faults: list[str] = []
    history = _history(faults)
    lines = [_line(spec, history, faults, editable(spec["name"])) for spec in _specs(faults) if readable(spec["name"])]
    lines.sort(key=lambda line: not (line["serving"] or {}).get("champion"))  # what serves first
    names = {line["name"] for line in lines}
    return {
        "lines": lines,
        "jobs": [_job(row) for row in history["jobs"] if row["pipeline"] in names],
        "devices": history["devices"],
        "alerts": [row for row in history["alerts"] if row["pipeline"] is None or row["pipeline"] in names],
        "faults": sorted(set(faults)),
        "addresses": {"mlflow": os.environ.get("MLFLOW_TRACKING_URI", "")},
    }


def _history(faults: list[str]) -> dict[str, Rows]:
    wanted = {name: f"board_{name}" for name in ("runs", "jobs", "devices", "alerts", "rollouts")}
    empty: dict[str, Rows] = {name: [] for name in wanted}
    if not projection.configured():
        return empty
    import psycopg
    from psycopg.rows import dict_row

    try:
        with projection.connection() as database:
            database.read_only = True
            cursor = database.cursor(row_factory=dict_row)
            return {name: cursor.execute(query(statement).encode()).fetchall() for name, statement in wanted.items()}
    except psycopg.Error as error:
        faults.append(f"History is away: {str(error).strip().splitlines()[0]}")
        return empty


def _specs(faults: list[str]) -> Rows:
    folder = Path(os.environ.get("REFIT_PIPELINES") or Path(__file__).parents[2] / "dags" / "pipelines")
    found = []
    for path in sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")]):
        try:
            spec = load(path)
        except RefitError as error:
            faults.append(f"{path.name} cannot be used: {str(error).splitlines()[0]}")
            continue
        found.append({"name": spec.name, "title": spec.title, "team": spec.team, "owner": spec.owner,
                      "description": spec.description, "steps": [0, *spec.rollout.steps]})  # fmt: skip
    return found


def _line(spec: dict[str, Any], history: dict[str, Rows], faults: list[str], can_edit: bool) -> dict[str, Any]:
    serving: dict[str, Any] | None = None
    try:
        serving = Controller(attempts=1).pipeline(spec["name"])
    except RefitError as error:
        if getattr(error, "status", None) != 404:  # a line that never ran is not a fault
            faults.append(f"The rollout controller does not answer: {error}")
    rollout = next((row for row in history["rollouts"] if row["pipeline"] == spec["name"]), None)
    return {
        **spec,
        "dag_id": f"retrain_{spec['name']}",
        "can_edit": can_edit,
        "serving": _serving(serving),
        "rollout": _rollout(rollout, (serving or {}).get("rollout"), spec["steps"]),
        "runs": [_run(row) for row in history["runs"] if row["pipeline"] == spec["name"]],
    }


def _serving(serving: dict[str, Any] | None) -> dict[str, Any] | None:
    if serving is None:
        return None
    roles = {role: (serving.get(role) or {}).get("id") for role in ("champion", "previous", "challenger")}
    return {**roles, "weight": serving.get("weight") or 0}


def _rollout(row: dict[str, Any] | None, live: dict[str, Any] | None, steps: list[int]) -> dict[str, Any] | None:
    """A rollout as its steps, each with its share and its newest verdict. Where the controller speaks, it is right."""
    known = {**(row or {}), **{name: value for name, value in (live or {}).items() if value is not None}}
    if not known:
        return None
    policy = known.get("policy") or {}
    shares = (policy.get("steps") if isinstance(policy, dict) else None) or steps
    shares = shares if shares[0] == 0 else [0, *shares]  # step 0 is shadow, and may go without saying
    verdicts: dict[int, dict[str, Any]] = {}
    for entry in known.get("journal") or []:
        if entry.get("verdict"):
            verdicts[int(entry["step"])] = {"verdict": entry["verdict"], "why": entry.get("why"), "at": entry.get("at")}
    now = int(known.get("step") or 0)
    state = known.get("state")
    if live and live.get("verdict"):
        verdicts[now] = {"verdict": live["verdict"], "why": live.get("why"), "at": verdicts.get(now, {}).get("at")}
    return {
        "id": known.get("id"), "state": state, "step": now, "weight": known.get("weight") or 0,
        "candidate": known.get("candidate"), "why": known.get("why"), "started_at": known.get("started_at"),
        "steps": [{"step": number, "share": share, **verdicts.get(number, {"verdict": None, "why": None, "at": None})}
                  for number, share in enumerate(shares)],
    }  # fmt: skip


def _run(row: dict[str, Any]) -> dict[str, Any]:
    report = row.pop("report")
    return {**row, "report": page_of(report) if report else ""}


def _job(row: dict[str, Any]) -> dict[str, Any]:
    output = row.pop("output")
    status = progress.status_of(output) if row["state"] in ("running", "retrying") else None
    return {
        **row,
        "folder": page_of(output),
        "share": progress.share(status) if status else None,
        "progress": progress.line(status) if status else None,
    }
