"""A checkpoint against the model that its training began with, while the training goes on."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from conftest import House, call
from test_validation import by_intent

from refit.job import Job
from refit.pipeline import load as load_spec
from refit.spec import Early
from trainer.early import compare

SPOILS = ("train.learning_rate=1", "train.schedule=constant", "train.warmup_steps=0")


def asked(house: House, monkeypatch: pytest.MonkeyPatch, output: str, step: int, *sets: str) -> tuple[int, Any]:
    """The answer of an early look at a checkpoint below the root."""
    spec = load_spec(house.spec, [*sets, f"train.early.at_step={step}", "train.heartbeat_seconds=0.2"])
    job = Job.build(
        "early", spec, store=house.root.as_uri(), output=house.uri(f"looks/{output}-{step}"),
        inputs={"dataset": house.data, "base": house.base},
        options={"checkpoint": house.uri(f"{output}/checkpoints/step-{step}")},
    )  # fmt: skip
    monkeypatch.setenv("REFIT_JOB", job.save())
    code, answer, _ = call(house.argv("run")[:3])
    return code, answer


@pytest.mark.integration
def test_a_training_that_learns_is_fine_and_one_that_spoils_the_model_is_worse(
    house: House, trained: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, fine = asked(house, monkeypatch, "alone", 12)
    assert (code, fine["verdict"], fine["documents"]) == (0, "fine", 40)
    # One document an item, and all of its targets: the same number as without packs, if answers are as long.
    assert fine["loss"] == pytest.approx(np.mean(list(by_intent(house, trained["model"]).values())), rel=0.2)
    assert fine["high"] < 0
    folder = house.root / "looks/alone-12"
    last_sign = json.loads((folder / "status.json").read_text())["heartbeat"]
    assert last_sign > (folder / "ranks/task.json").stat().st_mtime, (
        "a large model takes longer than a job may be silent"
    )
    house.train("early-spoilt", sets=SPOILS)
    code, worse = asked(house, monkeypatch, "early-spoilt", 8, *SPOILS)
    assert (code, worse["verdict"]) == (0, "worse")
    assert worse["base_loss"] == pytest.approx(fine["base_loss"]), "the same model answered the same documents"
    assert 0 < worse["low"] < worse["difference"] < worse["high"]
    code, answer = asked(house, monkeypatch, "early-spoilt", 12)
    assert code == 10
    assert "of training" in answer["message"]


def test_few_documents_say_nothing_and_a_margin_is_kept() -> None:
    base = np.linspace(1.0, 2.0, 40)
    up = base + np.linspace(0.1, 0.3, 40)
    assert compare(up, base, Early())["verdict"] == "worse"
    assert compare(up, base, Early(margin=0.5))["verdict"] == "fine"
    assert compare(up[:10], base[:10], Early())["verdict"] == "unknown"
    assert compare(base, base, Early())["verdict"] == "fine"
