"""From nothing to a new champion, and again."""

from __future__ import annotations

from typing import Any

from tests.scenarios.house import House


def test_the_candidate_beats_the_first_champion_and_takes_all_users(house: House, first_run: dict[str, Any]) -> None:
    assert first_run["outcome"] == "promoted", first_run["why"]
    assert first_run["comparison"]["difference"]["low"] > 0
    line = house.line()
    assert line["champion"]["id"] == first_run["candidate"]
    assert line["previous"]["id"] == first_run["champion"]
    assert first_run["counts"]["total"] > 50
    assert first_run["counts"]["failed"] == 0


def test_the_same_run_again_finds_the_champion_and_computes_nothing(house: House, first_run: dict[str, Any]) -> None:
    run = house.start(fresh=False)
    outcome = run.end()
    assert outcome["outcome"] == "already champion"
    trained = run.output("train.train")
    assert (trained / "manifest.json").stat().st_mtime < float(outcome["jobs"][0]["at"])
    states = run.states()
    assert states["roll_out.start"] == "skipped"
    assert states["evaluate.gate"] == "skipped"
