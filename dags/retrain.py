"""Retrain a model, prove it better, roll it out: one DAG per file in pipelines/."""

from __future__ import annotations

from pathlib import Path

from airflow.sdk import DAG
from stages.begin_and_end import check, conclude, refuse
from stages.data import prepare_data
from stages.evaluation import evaluate
from stages.first_champion import first_champion
from stages.promotion import promote
from stages.rollout import roll_out
from stages.training import train

from operators.lines import load_lines

for line in load_lines(Path(__file__).parent / "pipelines"):
    with DAG(
        dag_id=line.dag_id, schedule=line.schedule(), params=line.form(), doc_md=line.docs(), **line.house_rules()
    ):
        if line.spec is None:
            refuse(line)
            continue
        spec = check(line)
        dataset = prepare_data(line, spec)
        there_is_a_champion = first_champion(spec, dataset)
        training, candidate = train(line, spec, dataset, after=there_is_a_champion)
        report = evaluate(spec, dataset, candidate)
        release = promote(line, spec, candidate, {"dataset": dataset, "training": training, "comparison": report})
        rolled_out = roll_out(line, spec, release)
        conclude(line, candidate, after=rolled_out)
