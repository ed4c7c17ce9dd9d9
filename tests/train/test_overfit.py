"""A handful learnt by heart before the training: near 0, or refused with a reason that a person can act on."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import House

from refit.spec import Train
from trainer import overfit

WHOLE_BUDGET = ("train.overfit.share=1",)


def recipe(**changes: object) -> Train:
    return Train.model_validate({"base": "cache://models/x", "warmup_steps": 0, **changes})


@pytest.mark.integration
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_handful_is_learnt_by_heart_and_publishes_nothing(house: House, ranks: int) -> None:
    place = f"heart-{ranks}"
    sets = ("train.max_steps=200", "train.overfit.steps=100", *WHOLE_BUDGET)
    code, answer, said = house.run("overfit", "--store", house.uri(place), "--ranks", str(ranks), sets=sets)
    assert code == 0, said
    assert answer["learnt"]
    assert answer["losses"][-1] <= 0.2 < answer["losses"][0]
    assert len(answer["packs"]) == 2
    assert [path.name for path in (house.root / place).iterdir()] == ["training"], "no model"
    again = house.run("overfit", "--store", house.uri(place), "--ranks", str(ranks), sets=sets)
    assert again[1] == answer
    assert "answered" in again[2]


@pytest.mark.integration
def test_two_ranks_at_zero_3_learn_the_handful_as_one_does(house: House) -> None:
    """Every rank learns the same micro batch, so the gradient's mean over ranks must be the handful's own."""
    curves = []
    for place, ranks, stage in (("curve-1", 1, 0), ("curve-2", 2, 3)):
        sets = ("train.overfit.steps=6", "train.overfit.loss=1e-9", f"train.zero_stage={stage}")
        code, answer, said = house.run("overfit", "--store", house.uri(place), "--ranks", str(ranks),
                                       sets=(*sets, "train.overfit.share=0.2"))  # fmt: skip
        assert code == 0, said
        curves.append(answer["losses"])
    few = min(map(len, curves))
    assert few >= 2
    assert curves[1][:few] == pytest.approx(curves[0][:few], rel=1e-3)


@pytest.mark.integration
def test_a_learning_rate_that_is_far_off_is_refused_with_its_name(house: House) -> None:
    sets = ("train.learning_rate=1e-9", "train.overfit.steps=5", *WHOLE_BUDGET)
    code, answer, _ = house.run("overfit", "--store", house.uri("tiny-rate"), sets=sets)
    assert code == 11
    assert "did not move" in answer["message"]
    assert "train.learning_rate" in answer["message"]


@pytest.mark.integration
def test_a_budget_that_is_over_early_refuses_nothing(house: House) -> None:
    code, answer, said = house.run("overfit", "--store", house.uri("early"), sets=("train.learning_rate=1e-9",))
    assert code == 0, said
    assert answer["learnt"] is False
    assert answer["steps"] == 2, "a tenth of 12 steps of 2 micro batches"


def test_it_can_be_left_out(house: House) -> None:
    code, answer, _ = house.run("overfit", "--store", house.uri("out"), sets=("train.overfit.steps=0",))
    assert code == 10
    assert "leaves it out" in answer["message"]


def test_a_tenth_of_the_training_s_micro_batches_is_the_default_limit() -> None:
    assert overfit.steps_allowed(recipe(max_steps=1000, accumulation=8)) == 300
    assert overfit.steps_allowed(recipe(max_steps=1000, accumulation=2)) == 200
    assert overfit.steps_allowed(recipe(max_steps=1000, accumulation=2, ranks=2)) == 100
    assert overfit.steps_allowed(recipe(max_steps=3)) == 1


def test_the_budget_is_no_part_of_what_is_trained(house: House) -> None:
    from refit.fingerprint import training_fingerprint

    names = {training_fingerprint(recipe(overfit={"steps": steps}), dataset="d", base="b") for steps in (0, 50)}
    assert len(names) == 1


@pytest.mark.parametrize(
    ("losses", "norms", "reason"),
    [
        ([5.0, 5.0, 5.0], [0.0, 0.0], "frozen"),
        ([5.0, 4.99, 4.98], [1.0, 1.0], "did not move"),
        ([5.0, 9.0, 12.0], [1.0, 50.0], "lower train.learning_rate"),
        ([5.0, 0.4, 3.0], [1.0, 9.0], "jumps"),
        ([5.0, 1.5, 0.9, 0.71, 0.7], [1.0] * 4, "contradict"),
    ],
)
def test_a_curve_says_what_may_be_wrong(losses: list[float], norms: list[float], reason: str) -> None:
    assert reason in overfit.why(losses, norms, 0.2)


def test_packs_without_a_target_are_passed_over(house: House) -> None:
    from refit.store import store_for
    from trainer.inputs import train_split

    split = train_split(store_for(house.data).local(house.data), Train(base="cache://models/x"))
    packs = overfit.handful(split, recipe(micro_batch=3))
    assert len(set(packs.tolist())) == 3
    assert (np.count_nonzero(split.mask[packs][:, 1:], axis=1) > 0).all()
