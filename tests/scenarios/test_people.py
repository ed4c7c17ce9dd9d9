"""What people do to a line besides starting it: they deliver data, stop a run, and say no."""

from __future__ import annotations

from typing import Any

from standalone.airflow import Airflow
from tests.scenarios.house import DAG_ID, PIPELINE, House, Run, steps, until, working_on


def test_new_data_starts_a_run_and_a_person_who_stops_it_leaves_nothing_behind(
    house: House, first_run: dict[str, Any]
) -> None:
    champion = house.line()["champion"]["id"]
    with Airflow(house.home) as airflow:
        assets = airflow.ask("GET", "/api/v2/assets", params={"name_pattern": f"raw_{PIPELINE}"})["assets"]
        airflow.ask("POST", "/api/v2/assets/events", json={"asset_id": assets[0]["id"]})
        started = until(lambda: [r for r in airflow.runs(DAG_ID) if r["run_type"] == "asset_triggered"], 60, "a run")
        run = Run(house, started[0]["dag_run_id"])
        output = run.output("train.train")
        until(lambda: len(steps(output)) > 3, 300, "a few steps of training")
        assert working_on(output)
        airflow.ask("PATCH", f"/api/v2/dags/{DAG_ID}/dagRuns/{run.id}", json={"state": "failed"})
    until(lambda: not working_on(output), 60, "the whole training is gone")
    assert house.line()["champion"]["id"] == champion
    assert house.line()["rollout"] is None


def test_a_candidate_that_a_person_refuses_meets_no_user(house: House, first_run: dict[str, Any]) -> None:
    champion = house.line()["champion"]["id"]
    run = house.start(promote__approval="true")
    until(lambda: run.states().get("promote.approve") == "awaiting_input", 400, "somebody is asked")
    # An answer that comes before the scheduler has heard that the question's process ended counts as a crash there.
    log = house.home.logs / "airflow-scheduler.log"
    heard = f"TaskInstance Finished: dag_id={DAG_ID}, task_id=promote.approve, run_id={run.id}"
    until(lambda: heard in log.read_text(errors="replace"), 60, "the scheduler knows that somebody is asked")
    path = f"/api/v2/dags/{DAG_ID}/dagRuns/{run.id}/taskInstances/promote.approve/-1/hitlDetails"
    with Airflow(house.home) as airflow:
        assert "report" in airflow.ask("GET", path)["body"]
        airflow.ask("PATCH", path, json={"chosen_options": ["Reject"]})
    outcome = run.end()
    assert outcome["outcome"] == "stopped at gate", outcome["why"]
    assert outcome["rollout"] is None
    assert run.states()["roll_out.start"] == "skipped"
    assert house.line()["champion"]["id"] == champion
    assert house.line()["rollout"] is None
