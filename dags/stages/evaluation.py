"""Is it better? Both models answer the same exam in the form they are served in, and are compared in pairs."""

from __future__ import annotations

from typing import Any

from airflow.sdk import XComArg, task, task_group

from operators import run
from operators.evaluation import CompareOperator, EvaluateOperator, pass_gate
from operators.serving import VllmOperator


@task_group(group_id="evaluate", group_display_name="Evaluation")
def evaluate(spec: XComArg, dataset: XComArg, candidate: XComArg) -> Any:
    """Serve → ask both → (the candidate is the champion already: all done) → compare → gate."""

    @task(task_id="champion")
    def champion(spec: str, candidate: str) -> str:
        return run.name_champion(spec)

    @task.short_circuit(task_id="is_new")
    def is_new(candidate: str, champion: str) -> bool:
        return run.read_release(candidate).id != run.read_release(champion).id

    @task(task_id="gate")
    def gate(comparison: str) -> str:
        return pass_gate(comparison)

    inputs = {"dataset": dataset}
    to_beat = champion(spec, candidate)
    serve_candidate = VllmOperator(task_id="serve_candidate", release=candidate)
    serve_champion = VllmOperator(task_id="serve_champion", release=to_beat)
    ask_candidate = EvaluateOperator(task_id="ask_candidate", spec=spec, inputs=inputs, release=candidate)
    ask_champion = EvaluateOperator(task_id="ask_champion", spec=spec, inputs=inputs, release=to_beat)
    new = is_new(candidate, to_beat)
    comparison = CompareOperator(
        task_id="compare", spec=spec, inputs={"candidate": ask_candidate.output, "champion": ask_champion.output}
    )
    serve_candidate >> ask_candidate
    serve_champion >> ask_champion
    [ask_candidate, ask_champion] >> new >> comparison
    return gate(comparison.output)
