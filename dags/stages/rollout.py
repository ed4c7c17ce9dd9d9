"""Users meet it step by step: shadow first, then a growing share; the controller takes a harmful one back by itself."""

from __future__ import annotations

from typing import Any

from airflow.sdk import TriggerRule, XComArg, task_group

from operators.lines import Line
from operators.promotion import RegistryOperator
from operators.rollout import RolloutFinishOperator, RolloutStartOperator, RolloutStepOperator


@task_group(group_id="roll_out", group_display_name="Rollout")
def roll_out(line: Line, spec: XComArg, release: XComArg) -> Any:
    """Shadow → each share of the pipeline file → finish. A form with fewer steps skips the last tasks."""
    start = RolloutStartOperator(task_id="start", spec=spec, release=release)
    step = start
    for number, share in enumerate((0, *line.steps)):
        entered = RolloutStepOperator(
            task_id=f"step_{number}" if number else "shadow",
            task_display_name=f"{share} %" if number else "shadow",
            spec=spec,
            rollout=start.output,
            step=number,
            walks_on=number == len(line.steps),
        )
        step >> entered
        step = entered
    finish = RolloutFinishOperator(task_id="finish", rollout=start.output, trigger_rule=TriggerRule.NONE_FAILED)
    aliases = RegistryOperator(task_id="aliases", release=release)
    step >> finish >> aliases
    return aliases.output
