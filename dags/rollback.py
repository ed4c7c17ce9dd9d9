"""Put the model back: a running rollout is taken back, otherwise the previous champion returns. Works at any time."""

from __future__ import annotations

from pathlib import Path

from airflow.sdk import DAG, Param, get_current_context, task

from operators.controller import Controller
from operators.lines import load_lines
from operators.promotion import mirror_aliases
from operators.retries import ByKind

names = [line.name for line in load_lines(Path(__file__).parent / "pipelines")]

with DAG(
    dag_id="rollback",
    dag_display_name="Roll back",
    description="Take a running rollout back, or put the previous champion back.",
    schedule=None,
    catchup=False,
    tags=["rollout"],
    doc_md=__doc__,
    params={
        "pipeline": Param(names[0] if names else None, title="Line", type="string", enum=names or [""]),
        "reason": Param(title="Why", description_md="It is kept with the history.", type="string", minLength=3),
    },
    default_args={"owner": "on call", "retries": 3, "retry_policy": ByKind()},
):

    @task(task_id="roll_back")
    def roll_back() -> None:
        """The controller moves users first, and writes it down then."""
        params = get_current_context()["params"]
        print(Controller().roll_back(params["pipeline"], params["reason"]))

    @task(task_id="aliases")
    def aliases() -> None:
        """MLflow follows."""
        print(mirror_aliases(get_current_context()["params"]["pipeline"]))

    roll_back() >> aliases()
