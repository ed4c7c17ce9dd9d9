"""Registered with all its manifests, as the challenger; a person may be asked first."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk import TriggerRule, XComArg, task, task_group

from operators import run
from operators.lines import Line
from operators.promotion import RegistryOperator


@task_group(group_id="promote", group_display_name="Promotion")
def promote(line: Line, spec: XComArg, candidate: XComArg, made_by: Mapping[str, XComArg]) -> Any:
    """(Approval) → registry. A "no", or no answer in time, skips the rest."""

    @task.branch(task_id="ask_a_person")
    def ask_a_person(spec: str, report: str) -> str:
        return "promote.approve" if run.read_spec(spec).promote.approval else "promote.register"

    assert line.spec is not None
    choice = ask_a_person(spec, made_by["comparison"])
    approve = ApprovalOperator(
        task_id="approve",
        subject=f"Roll out a new model of {line.spec.title}?",
        body="It passed the gate. The report is a link on the task evaluate.compare of this run.",
        defaults="Reject",
        response_timeout=timedelta(hours=line.spec.promote.approval_hours),
    )
    register = RegistryOperator(
        task_id="register", release=candidate, made_by=made_by, trigger_rule=TriggerRule.NONE_FAILED
    )
    choice >> [approve, register]
    approve >> register
    return register.output
