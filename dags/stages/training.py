"""How the model learns: a plan a person can read, a few steps to see that it works, then the training."""

from __future__ import annotations

from typing import Any

from airflow.sdk import TriggerRule, XComArg, task, task_group

from operators import run
from operators.training import CheckpointSensor, DeepSpeedOperator


@task_group(group_id="train", group_display_name="Training")
def train(spec: XComArg, dataset: XComArg, *, after: XComArg) -> Any:
    """Plan → smoke → train, with a sensor on its checkpoints beside it; the training, and the candidate's name."""

    @task(task_id="candidate")
    def candidate(spec: str, trained: str) -> str:
        return run.name_candidate(spec, trained)

    inputs = {"dataset": dataset}
    plan = DeepSpeedOperator(
        task_id="plan", kind="plan", spec=spec, inputs=inputs, trigger_rule=TriggerRule.NONE_FAILED
    )
    smoke = DeepSpeedOperator(task_id="smoke", kind="smoke", spec=spec, inputs=inputs)
    training = DeepSpeedOperator(task_id="train", spec=spec, inputs=inputs)
    sensor = CheckpointSensor(task_id="checkpoint", spec=spec, dataset=dataset, beside="train.train")
    after >> plan >> smoke >> [training, sensor]
    return training.output, candidate(spec, training.output)
