"""The loss on the validation split: to look disturbs nothing, the best is kept, and who gets no better stops."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
import tickets
import torch
from conftest import House

from refit.errors import BadSpec
from refit.pipeline import load as load_spec
from refit.store import store_for
from trainer.batches import to_batch
from trainer.objective import Objective, load
from trainer.validation import Best, Look, Validator

LOOKS = ("train.validation.every_steps=4",)
OVERSHOOTS = (
    "train.schedule=constant", "train.learning_rate=0.3", "train.max_steps=40", "train.warmup_steps=0",
    "train.checkpoint.every_steps=100", "train.checkpoint.keep_last=1", "train.validation.every_steps=1",
)  # fmt: skip
PATIENT = (*OVERSHOOTS, "train.validation.patience=2", "train.validation.publish=best")


def looks(house: House, output: str) -> dict[int, float]:
    return {r["step"]: r["validation_loss"] for r in house.metrics(output) if "validation_loss" in r}


def test_the_best_is_the_lowest_and_the_first_of_equals() -> None:
    best = Best(2, 1.0)
    assert best.after(4, 1.0) == Best(2, 1.0, since=1)
    assert best.after(4, 1.5).after(6, 1.2) == Best(2, 1.0, since=2)
    assert best.after(4, 1.5).after(6, 0.9) == Best(6, 0.9)


def test_a_best_that_is_forgotten_gives_way_to_the_one_before_which_has_counted_on() -> None:
    validator = Validator.__new__(Validator)
    validator.best, validator._former = None, []
    losses = iter([3.0, 2.0, 1.0, 2.5])
    validator._look = lambda: Look(next(losses), {})  # type: ignore[method-assign]
    for step in (1, 2, 3, 4):
        validator.look(step)
    assert validator.best == Best(3, 1.0, since=1)
    validator.forget(4)
    assert validator.best == Best(3, 1.0, since=1)
    validator.forget(2)
    validator.forget(3)
    assert validator.best == Best(1, 3.0, since=1)
    validator.forget(1)
    assert validator.best is None


@pytest.mark.parametrize("wrong", ["train.validation.patience=2", "train.validation.publish=best"])
def test_what_needs_looks_asks_for_them(house: House, wrong: str) -> None:
    with pytest.raises(BadSpec, match="set every_steps"):
        load_spec(house.spec, [wrong])


@pytest.mark.integration
def test_a_training_with_looks_takes_the_same_steps(house: House, trained: dict) -> None:
    answer = house.train("watched", sets=LOOKS)
    assert house.losses("watched") == house.losses("alone")
    assert answer["model_digest"] == trained["model_digest"]
    seen = looks(house, "watched")
    assert list(seen) == [4, 8, 12]
    assert seen[12] < seen[4]
    last = house.metrics("watched")[-1]
    assert last["validation_losses"] == pytest.approx(by_intent(house, answer["model"]), rel=1e-5)
    assert min(last["validation_losses"].values()) < seen[12] < max(last["validation_losses"].values())


@pytest.mark.integration
def test_a_look_takes_no_random_number_of_the_training(house: House) -> None:
    """With dropout each step draws some; a look that drew any, or left the model without dropout, would move them."""
    sets = ("train.method=lora", "train.lora.dropout=0.1", "train.max_steps=6", "train.checkpoint.every_steps=6")
    house.train("dropped-alone", sets=sets)
    house.train("dropped-watched", sets=(*sets, "train.validation.every_steps=2"))
    assert house.losses("dropped-watched") == house.losses("dropped-alone")
    numbers = [
        house.root / name / "checkpoints/step-6/rng-rank-0.json" for name in ("dropped-alone", "dropped-watched")
    ]
    assert numbers[0].read_bytes() == numbers[1].read_bytes()


def by_intent(house: House, model: str) -> dict[str, float]:
    """The mean loss of the tickets of each intent, one at a time, without packs."""
    base, folder = (store_for(uri).local(uri) for uri in (house.base, model))
    objective = Objective(load(folder, dtype=torch.float32, attention="eager").eval(), bfloat16=False)
    sums: dict[str, list[float]] = {}
    documents = zip(tickets.documents(base, 40, 2), tickets.tickets(40, 2), strict=True)
    for document, (_, answer) in documents:
        batch = to_batch(*tickets.pack([document], tickets.LENGTH))
        total = sums.setdefault(json.loads(answer)["intent"], [0.0, 0.0])
        with torch.no_grad():
            total[0] += float(objective(batch))
        total[1] += len(batch.labels)
    return {intent: loss / count for intent, (loss, count) in sums.items()}


@pytest.fixture(scope="module")
def looked_alone(house: House) -> dict[int, float]:
    house.train("looked-alone", sets=("train.max_steps=4", *LOOKS))
    return looks(house, "looked-alone")


@pytest.mark.integration
@pytest.mark.parametrize("stage", [0, 3])
def test_any_number_of_ranks_sees_the_same_loss(house: House, looked_alone: dict[int, float], stage: int) -> None:
    house.train(f"two-{stage}", ranks=2, sets=("train.max_steps=4", f"train.zero_stage={stage}", *LOOKS))
    assert looks(house, f"two-{stage}") == pytest.approx(looked_alone, rel=1e-3)


@pytest.fixture(scope="module")
def patient(house: House) -> dict[str, Any]:
    """A training that gets worse soon, and stops for it."""
    return house.train("patient", sets=PATIENT)


@pytest.mark.integration
def test_it_stops_when_it_gets_no_better_and_publishes_the_best(house: House, patient: dict[str, Any]) -> None:
    answer = patient
    seen = looks(house, "patient")
    best = min(seen, key=lambda step: seen[step])
    assert answer["steps"] == len(seen) == best + 2 < 40
    assert sorted(path.name for path in (house.root / "patient/checkpoints").glob("step-*")) == sorted(
        [f"step-{best}", f"step-{best + 2}"]
    )
    facts = store_for(house.base).require(house.uri("patient"), "train").facts
    assert facts["best"] == {"step": best, "loss": seen[best], "since": 2}
    short = house.train("short", sets=(*OVERSHOOTS, f"train.max_steps={best}"))
    assert short["model_digest"] == answer["model_digest"]


@pytest.mark.integration
def test_a_resume_knows_the_best_and_how_long_ago_it_was(house: House, patient: dict[str, Any]) -> None:
    whole = patient
    output = house.root / "patient-again"
    shutil.copytree(house.root / "patient", output)
    (output / "manifest.json").unlink()
    again = house.train("patient-again", sets=PATIENT)
    assert again["resumed_from"] == whole["steps"], "it had stopped, and stops again"
    assert again["model_digest"] == whole["model_digest"]
    shutil.rmtree(output / "checkpoints" / f"step-{whole['steps']}")
    (output / "manifest.json").unlink()
    again = house.train("patient-again", sets=PATIENT)
    assert again["resumed_from"] == whole["steps"] - 2
    assert (again["steps"], again["model_digest"]) == (whole["steps"], whole["model_digest"])
    assert house.losses("patient-again") == house.losses("patient")
    assert looks(house, "patient-again") == looks(house, "patient")
