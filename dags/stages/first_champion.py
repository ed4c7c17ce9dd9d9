"""Before the first run there must be something to beat and to go back to. Skipped when there is a champion."""

from __future__ import annotations

from typing import Any

from airflow.sdk import TriggerRule, XComArg, task, task_group

from operators import run
from operators.controller import Controller
from operators.promotion import RegistryOperator
from operators.serving import VllmOperator
from operators.training import DeepSpeedOperator


@task_group(group_id="first_champion", group_display_name="First champion")
def first_champion(spec: XComArg, dataset: XComArg) -> Any:
    """The base model as it is, or one trained for a few steps: registered, served, routed."""

    @task.branch(task_id="needed")
    def needed(spec: str) -> str | None:
        settings = run.read_spec(spec)
        if Controller().champion(settings.name) is not None:
            return None
        kind = settings.promote.first_champion.kind
        return "first_champion.train" if kind == "trained" else "first_champion.release"

    @task(task_id="release", trigger_rule=TriggerRule.NONE_FAILED)
    def release(spec: str, trained: str | None) -> str:
        return run.name_first_champion(spec, trained)

    choice = needed(spec)
    trained = DeepSpeedOperator(task_id="train", spec=spec, inputs={"dataset": dataset}, first_champion=True)
    named = release(spec, trained.output)
    served = VllmOperator(task_id="serve", release=named, first_champion=True)
    registered = RegistryOperator(task_id="register", release=named, made_by={"training": trained.output})
    choice >> [trained, named]
    served >> registered
    return registered.output
