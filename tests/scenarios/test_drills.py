"""A model trained on shuffled labels: the gate stops it; let through, users take it back without anybody."""

from __future__ import annotations

from typing import Any

from tests.scenarios.house import House

SHUFFLED = {"data__drill": "shuffle_labels", "train__seed": "7"}


def test_the_gate_stops_a_model_that_learnt_nonsense(house: House, first_run: dict[str, Any]) -> None:
    champion = house.line()["champion"]["id"]
    run = house.start(fresh=False, **SHUFFLED)
    outcome = run.end()
    assert outcome["outcome"] == "stopped at gate"
    assert outcome["comparison"]["verdict"] == "fail"
    assert run.states()["roll_out.start"] in ("skipped", "upstream_failed")
    assert house.line()["champion"]["id"] == champion
    assert house.line()["weight"] == 0


def test_let_through_the_gate_it_is_taken_back_in_the_canary(house: House, first_run: dict[str, Any]) -> None:
    champion = house.line()["champion"]["id"]
    run = house.start(
        fresh=False, **SHUFFLED, evaluate__gate__force="true", rollout__steps="[20, 100]", rollout__min_events="40",
        rollout__margin="0.05",
    )  # fmt: skip
    users = house.users("drill")
    users.ask(run.heldout(), rate=12)
    try:
        outcome = run.end()
    finally:
        users.leave()
    assert outcome["comparison"]["forced"] is True
    assert outcome["outcome"] == "rolled back", outcome["why"]
    assert house.line()["champion"]["id"] == champion
    assert house.split() == 0
    assert users.counts()["failed"] == 0
