"""How the model learns: a plan a person can read, what is tried before, then the training.

`trial` is one task for preflight, a handful learnt by heart and the smoke run, in that order. Each is an event and a
part of the trial's manifest, and answers of the last two are found again by other runs; but a start of processes costs
more than a small trial itself (torch alone takes seconds), so they share one. What changes from hour to hour, preflight
looks at in every run.
"""

from __future__ import annotations

from typing import Any

from airflow.sdk import TriggerRule, XComArg, task, task_group

from operators import run
from operators.early import EarlyOperator
from operators.lines import Line
from operators.training import CheckpointSensor, DeepSpeedOperator


@task_group(group_id="train", group_display_name="Training")
def train(line: Line, spec: XComArg, dataset: XComArg, *, after: XComArg) -> Any:
    """Plan → trial → train, with a sensor on its checkpoints beside it; the training, and the candidate's name.

    Where the line's file asks for it (`train.early.at_step`), a checkpoint is looked at while the training goes on.
    """
    assert line.spec is not None
    at_step = line.spec.train.early.at_step

    @task(task_id="candidate")
    def candidate(spec: str, trained: str) -> str:
        return run.name_candidate(spec, trained)

    inputs = {"dataset": dataset}
    plan = DeepSpeedOperator(
        task_id="plan", kind="plan", spec=spec, inputs=inputs, trigger_rule=TriggerRule.NONE_FAILED
    )
    trial = DeepSpeedOperator(task_id="trial", kind="trial", spec=spec, inputs={**inputs, "plan": plan.output})
    training = DeepSpeedOperator(task_id="train", spec=spec, inputs=inputs)
    sensor = CheckpointSensor(
        task_id="checkpoint", spec=spec, dataset=dataset, beside="train.train", step=at_step or 0, full=bool(at_step)
    )
    after >> plan >> trial >> [training, sensor]
    if at_step:
        EarlyOperator(task_id="early", spec=spec, inputs=inputs, checkpoint=sensor.output)
    return training.output, candidate(spec, training.output)
