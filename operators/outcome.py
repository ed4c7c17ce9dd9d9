"""How a run ended, in one word and one sentence: decided from what is written, whatever happened to the run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from operators import projection, quarantine, run, tracking
from operators.controller import Controller
from operators.data import CorpusOperator
from operators.promotion import mirror_aliases
from operators.rollout import rollout_id
from operators.training import STOPPED
from refit import runs
from refit.errors import RefitError
from refit.job import JOB, Job
from refit.manifest import Manifest
from refit.store import join, store_for

if TYPE_CHECKING:
    from airflow.sdk import Context

DAG_PREFIX = "retrain_"
GATE, FINISH, APPROVE, REGISTER = "evaluate.gate", "roll_out.finish", "promote.approve", "promote.register"
COMPARE, TRAIN = "evaluate.compare", "train.train"


class Outcome(StrEnum):
    """All the ways there are."""

    PROMOTED = "promoted"
    ALREADY_CHAMPION = "already champion"
    STOPPED_AT_GATE = "stopped at gate"
    ROLLED_BACK = "rolled back"
    FAILED = "failed"


def note_fault(context: Context) -> None:
    """A failed task's callback: keep what it died of, for the outcome."""
    ti, error = context["ti"], context.get("exception")
    place = run.folder(ti.dag_id.removeprefix(DAG_PREFIX), ti.run_id)
    runs.note_fault(place, ti.task_id, str(error) or type(error).__name__)


def conclude(pipeline: str, team: str, context: Context) -> str:
    """Write the run's outcome to its folder and to Postgres, and copy all that its jobs said once more.

    Returns:
        The URI of outcome.json.
    """
    ti, run_id = context["ti"], context["run_id"]
    states = ti.get_task_states(dag_id=ti.dag_id, run_ids=[run_id]).get(run_id, {})
    place = run.folder(pipeline, run_id)
    records = runs.noted(place)
    candidate = run.read_beside(join(place, runs.OUTCOME), runs.CANDIDATE)
    champion = run.read_beside(join(place, runs.OUTCOME), runs.CHAMPION)
    comparison = _comparison(records)
    rollout = _rollout(rollout_id(pipeline, run_id, candidate.id)) if candidate else None
    same = bool(candidate and champion and candidate.id == champion.id)
    outcome, why = decide(
        states, same=same, verdict=comparison.facts if comparison else {}, rollout=rollout or {},
        faults=runs.faults(place),
    )  # fmt: skip
    facts = {
        "candidate": candidate.id if candidate else None,
        "champion": champion.id if champion else None,
        "comparison": comparison.facts if comparison else None,
        "rollout": {name: rollout.get(name) for name in ("id", "state", "step", "weight", "why")} if rollout else None,
        "jobs": records,
    }
    ended = datetime.now(UTC)
    started = getattr(context["dag_run"], "start_date", None)
    document = {"pipeline": pipeline, "run_id": run_id, "outcome": outcome, "why": why, "started": started,
                "ended": ended, **facts}  # fmt: skip
    uri = run.write(json.loads(json.dumps(document, default=str)), join(place, runs.OUTCOME))
    with suppress(RefitError):  # MLflow is a mirror; the next run polishes it
        mirror_aliases(pipeline)
    for record in records:
        with suppress(RefitError):  # a job that never started has no document
            job = Job.load(join(record["output"], JOB))
            projection.project(job, run_id)
            tracking.catch_up(job)
            if job.kind == CorpusOperator.kind:
                quarantine.project(job)
    projection.run(id=f"{pipeline}/{run_id}", pipeline=pipeline, team=team, outcome=outcome, why=why,
                   started_at=started, ended_at=ended, facts=facts)  # fmt: skip
    if outcome not in (Outcome.PROMOTED, Outcome.ALREADY_CHAMPION):
        projection.alert(
            "suspicious", "retrain", f"{outcome}: {why}", key=f"run/{pipeline}/{run_id}", pipeline=pipeline
        )
    return uri


def decide(
    states: Mapping[str, str | None],
    *,
    same: bool,
    verdict: Mapping[str, Any],
    rollout: Mapping[str, Any],
    faults: Mapping[str, str],
) -> tuple[Outcome, str]:
    """The outcome and why.

    Args:
        states: task id → state.
        same: the candidate is the champion.
        verdict: the facts of the comparison, empty without one.
        rollout: where the rollout stands, empty without one.
        faults: task id → what it died of.
    """
    if states.get(FINISH) == "success":
        return Outcome.PROMOTED, str(verdict.get("why") or "the rollout ended well")
    if rollout.get("state") == "rolled_back":
        return Outcome.ROLLED_BACK, str(rollout.get("why") or "taken back by the controller")
    if states.get(GATE) == "failed" and verdict.get("verdict") in ("fail", "hold"):
        return Outcome.STOPPED_AT_GATE, f"{verdict['verdict']}: {verdict.get('why')}"
    if states.get(APPROVE) == "success" and states.get(REGISTER) == "skipped":
        return Outcome.STOPPED_AT_GATE, "not approved: rejected, or nobody answered in time"
    if states.get(TRAIN) == "failed" and faults.get(TRAIN, "").startswith(STOPPED):
        return Outcome.STOPPED_AT_GATE, faults[TRAIN]
    broken = sorted(task for task, state in states.items() if state == "failed")
    if broken:
        return Outcome.FAILED, "; ".join(f"{task}: {faults.get(task, 'failed, its log says why')}" for task in broken)
    if same:
        return Outcome.ALREADY_CHAMPION, "the candidate is what users get already: nothing changed"
    return Outcome.FAILED, "the run ended before its rollout did: stopped by hand, or out of time"


def _comparison(records: list[dict[str, Any]]) -> Manifest | None:
    output = next((record["output"] for record in records if record["task"] == COMPARE), None)
    return store_for(output).manifest(output) if output else None


def _rollout(name: str) -> dict[str, Any] | None:
    try:
        return Controller().rollout(name)
    except RefitError:  # there was none, or nobody can be asked now
        return None
