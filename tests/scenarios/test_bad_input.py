"""Bad input gets a clear answer, wherever it is given: at the trigger, by the first task, on the command line."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from refit.errors import BadInput
from refit.form import OVERRIDES
from tests.scenarios.house import PIPELINE, House

MAIL = {"name": "mail", "uri": "cache://data/tiny/mail.jsonl"}
NOWHERE = "file:///nowhere/mail.jsonl"


def conf(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings by their dotted names, as the form sends them: its fields by name, the rest as overrides."""
    given: dict[str, Any] = {}
    for name, value in settings.items():
        section, _, field = name.partition(".")
        in_form = name == "rollout.steps" or not field
        given |= {name: value} if in_form else {OVERRIDES: {section: {field: value}}}
    return given


@pytest.mark.parametrize(
    ("conf", "words"),
    [
        ({"train.max_steps": "many"}, ["train.max_steps", "many", "integer"]),
        ({"train.max_steps": 0}, ["train.max_steps", "0", "minimum"]),
        ({"overrides": {"train": {"max_stepz": 60}}}, ["max_stepz"]),
        ({"overrides": {"train": {"zero_stage": 9}}}, ["zero_stage", "9"]),
    ],
)
def test_what_a_schema_can_say_is_refused_at_the_trigger(house: House, conf: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(BadInput) as refused:
        house.trigger(conf)
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_stepz": 60}, ["max_stepz"]),
        ({"data.sources": [{**MAIL, "weight": 0}]}, ["weights of data.sources sum to 0"]),
        ({"data.sources": [{**MAIL, "uri": NOWHERE}]}, ["data.sources[0].uri", NOWHERE, "no such"]),
        ({"data.sources": [{**MAIL, "uri": "file://EMPTY"}]}, ["data.sources[0].uri", "0 rows"]),
        ({"rollout.steps": [50, 5, 100]}, ["rollout.steps", "[50, 5, 100]", "rise"]),
    ],
)
def test_what_it_cannot_is_refused_by_the_first_task_and_on_the_command_line(
    house: House, tmp_path: Path, settings: dict[str, Any], words: list[str]
) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    settings = json.loads(json.dumps(settings).replace("EMPTY", str(tmp_path / "empty.jsonl")))
    run = house.trigger(conf(settings))
    outcome = run.end(120)
    assert outcome["outcome"] == "failed"
    assert all(word in outcome["why"] for word in words), outcome["why"]
    assert run.tries("check") == 1, "trying again would not help"
    assert seconds(run.task("check")) < 10
    assert run.states()["prepare_data.corpus"] == "upstream_failed"
    sets = [word for name, value in settings.items() for word in ("--set", f"{name}={json.dumps(value)}")]
    said = house.refit("run", PIPELINE, *sets, code=10)["message"]
    assert all(word in said for word in words), said


def test_a_file_of_garbage_is_told_before_anything_is_trained(house: House, tmp_path: Path) -> None:
    garbage = tmp_path / "garbage.jsonl"
    garbage.write_bytes(b"\x00\xff\xfe\x80 not a record\n" * 50)
    run = house.trigger(conf({"data.sources": [{**MAIL, "uri": garbage.as_uri()}]}))
    outcome = run.end(180)
    assert outcome["outcome"] == "failed"
    assert "data.sources[0] (mail): none of its 1 rows is a record" in outcome["why"], outcome["why"]
    assert "binary" in outcome["why"]
    assert run.tries("prepare_data.corpus") == 1
    assert run.states()["train.plan"] == "upstream_failed"


def seconds(task: dict[str, Any]) -> float:
    started, ended = (datetime.fromisoformat(task[name]) for name in ("start_date", "end_date"))
    return (ended - started).total_seconds()
