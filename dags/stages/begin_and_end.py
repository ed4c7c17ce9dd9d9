"""The first task, which refuses what cannot work, and the last, which says how it ended."""

from __future__ import annotations

from typing import Any

from airflow.sdk import Context, XComArg, get_current_context, task

from operators import outcome, run
from operators.lines import Line
from operators.serving import VllmOperator
from refit.errors import BadSpec


def check(line: Line) -> XComArg:
    """Resolve the file and the form into the run's spec; every fault at once, before any compute."""

    @task(task_id="check", retries=0, doc_md="Reads the settings, looks whether sources and base model are there.")
    def resolve(path: str) -> str:
        context = get_current_context()
        return run.check(path, dict(context["params"]), context["run_id"])

    return resolve(str(line.path))


def refuse(line: Line) -> None:
    """A pipeline file that is wrong: its line stays listed, says why, and does not run."""

    @task(task_id="refuse", retries=0)
    def say_why(fault: str) -> None:
        raise BadSpec(fault)

    say_why(line.fault)


def conclude(line: Line, candidate: Any, *, after: Any) -> None:
    """Whatever happened: free the candidate's server unless users need it, and write the outcome down.

    Both are teardowns: they run after failures too, and do not turn a failed run green.
    """

    @task(task_id="conclude", retries=3)
    def write_outcome(pipeline: str, team: str) -> str:
        return outcome.conclude(pipeline, team, _context())

    assert line.spec is not None
    stop = VllmOperator(task_id="stop_candidate", release=candidate, action="stop").as_teardown()
    end = write_outcome(line.spec.name, line.spec.team).as_teardown()
    after >> stop
    after >> end


def _context() -> Context:
    return get_current_context()
