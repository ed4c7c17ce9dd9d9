"""A checkpoint as a model that can be served, and the card beside it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from conftest import House, call

from refit.job import Job
from refit.pipeline import load as load_spec
from refit.store import store_for
from trainer import card


def export(house: House, checkpoint: str, output: str, *more: str) -> tuple[int, dict, str]:
    program = house.argv("run")[:3]
    return call([*program, "export", house.uri(checkpoint), "--output", house.uri(output), *more])


def test_a_card_tells_what_a_model_was_made_from_and_only_what_is_known(house: House, tmp_path: Path) -> None:
    spec = load_spec(house.spec)
    job = Job.build("train", spec, store="file:///s", output="file:///s/o", inputs={"dataset": house.data})
    known = {"base_digest": "b" * 64, "dataset_digest": "d" * 64, "dataset_fingerprint": "tickets"}
    text = card.render(job, {"steps": 8, "loss": 1.23456, "tokens": 9000}, **known)
    for fact in (spec.train.base, house.data, "`tickets`", "8 of 12", "1.235", "9,000", "full", "seed 1"):
        assert fact in text
    assert "evaluation" not in text
    assert "licence" not in text
    (tmp_path / "LICENSE").write_text("\n  Apache License\nVersion 2.0\n")
    judged = ("file:///s/evaluations/x", {"items": 300, "accuracy": {"value": 0.9, "low": 0.86, "high": 0.93}})
    text = card.render(job, {"steps": 8, "loss": None, "tokens": None}, **known,
                       licence=card.licence_of(tmp_path), evaluation=judged)  # fmt: skip
    assert "| licence of the base model | Apache License |" in text
    assert "300 items, accuracy 0.900 (0.860 to 0.930), `file:///s/evaluations/x`" in text
    assert "loss" not in text


@pytest.mark.integration
def test_the_last_checkpoint_exports_the_very_model_that_was_published(house: House, trained: dict) -> None:
    code, answer, said = export(house, "alone/checkpoints/step-12", "served")
    assert code == 0, said
    assert answer["model_digest"] == trained["model_digest"]
    assert (answer["step"], answer["loss"], answer["ranks"]) == (12, trained["loss"], 1)
    assert answer["export_difference"] < 1e-5
    manifest = store_for(answer["model"]).require(house.uri("served"), "model")
    assert "README.md" not in {file.path for file in manifest.files}, "a card is not the model"
    for folder in (house.root / "served", store_for(trained["model"]).local(trained["model"])):
        assert "12 of 12" in (folder / "README.md").read_text()
    assert not list(house.root.glob(".export-*"))
    code, other, _ = export(house, "alone/checkpoints/step-8", "served")
    assert code == 10
    assert "Give another address" in other["message"]


@pytest.mark.integration
def test_a_model_trained_from_a_published_one_does_not_carry_its_card(house: House, trained: dict) -> None:
    answer = house.train("second", sets=(f"train.base={trained['model']}", "train.max_steps=1"))
    manifest = store_for(answer["model"]).require(answer["model"], "model")
    assert {file.path for file in manifest.files} == {
        file.path for file in store_for(trained["model"]).require(trained["model"], "model").files
    }
    assert trained["model"] in (store_for(answer["model"]).local(answer["model"]) / "README.md").read_text()


@pytest.mark.integration
def test_state_that_is_split_by_rank_is_exported_by_as_many_ranks_with_adapter_and_proof(house: House) -> None:
    published = house.train("split", ranks=2, sets=("train.zero_stage=2", "train.method=lora"))
    code, answer, said = export(house, "split/checkpoints/step-12", "split-served")
    assert code == 0, said
    assert (answer["ranks"], answer["model_digest"]) == (2, published["model_digest"])
    store_for(answer["adapter"]).require(house.uri("split-served-adapter"), "adapter")


@pytest.mark.integration
def test_a_damaged_checkpoint_another_base_or_a_lone_folder_is_not_exported(house: House, trained: dict) -> None:
    shutil.copytree(house.root / "alone" / "checkpoints" / "step-8", house.root / "lone")
    code, answer, _ = export(house, "lone", "no")
    assert (code, "no job.json two folders above it" in answer["message"]) == (10, True)
    shutil.copytree(house.root / "alone", house.root / "hurt")
    rng = house.root / "hurt/checkpoints/step-8/rng-rank-0.json"
    rng.write_text(rng.read_text().replace("1", "2", 1))
    code, answer, _ = export(house, "hurt/checkpoints/step-8", "no")
    assert (code, "rng-rank-0.json differs from its hash" in answer["message"]) == (10, True)
    code, answer, _ = export(house, "alone/checkpoints/step-8", "no", "--base", trained["model"])
    assert (code, "Give the ones it was trained with" in answer["message"]) == (10, True)
    assert not (house.root / "no").exists()
