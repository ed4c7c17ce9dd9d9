"""A training that begins with another one's weights: at its very loss, with an optimizer of its own, or not at all."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_preference as preference
import torch
from conftest import House, call
from pydantic import ValidationError
from safetensors import safe_open

from refit.errors import BadInput
from refit.fingerprint import training_fingerprint
from refit.job import Job, read_events
from refit.pipeline import load as load_spec
from refit.spec import Train
from refit.store import store_for
from trainer import warm
from trainer.batches import Loader
from trainer.inputs import locate, name_of, train_split
from trainer.objective import Objective, load

LORA = ("train.method=lora", "train.lora.rank=4")


@pytest.fixture(scope="module")
def base(house: House) -> Path:
    return store_for(house.base).local(house.base)


@pytest.fixture(scope="module")
def full(house: House) -> str:
    """A fast checkpoint of a full training, after step 8 of 12."""
    house.train("warm-source", sets=("train.checkpoint.fast_every_steps=8", "train.checkpoint.every_steps=100"))
    return house.uri("warm-source/checkpoints/fast-step-8")


@pytest.fixture(scope="module")
def warmed(house: House, full: str) -> dict[str, Any]:
    """A training that began with it, in the folder `warm-full`."""
    return house.train("warm-full", sets=begun(full))


@pytest.fixture(scope="module")
def adapter(house: House) -> str:
    """The last checkpoint of a training of adapters, a full one."""
    house.train("warm-source-lora", sets=LORA)
    return house.uri("warm-source-lora/checkpoints/step-12")


def begun(checkpoint: str, *sets: str) -> tuple[str, ...]:
    return (f"train.warm_start={checkpoint}", "train.checkpoint.every_steps=2", "train.max_steps=6", *sets)


def first_loss(model: Path, house: House, spec: Train) -> float:
    """What a model folder answers to the first step of a training, with no trainer about it."""
    split = train_split(store_for(house.data).local(house.data), spec)
    loader = Loader(split, spec, rank=0, ranks=1)
    step = loader.step(0)
    objective = Objective(load(model, dtype=torch.float32, attention="eager").eval(), bfloat16=False)
    with torch.no_grad():
        return sum(float(objective(batch)) for batch in step.batches) / step.weight


def job_of(house: House, *sets: str) -> Job:
    spec = load_spec(house.spec, sets)
    return Job.build("train", spec, store=house.root.as_uri(), output=house.uri("warm-nowhere"),
                     inputs={"dataset": house.data, "base": spec.train.base})  # fmt: skip


@pytest.mark.integration
def test_step_0_has_the_checkpoints_loss_and_a_resume_does_not_ask_for_its_weights_again(
    house: House, full: str, warmed: dict[str, Any]
) -> None:
    program = house.argv("run")[:3]
    code, exported, said = call([*program, "export", full, "--output", house.uri("warm-exported")])
    assert code == 0, said
    wanted = first_loss(store_for(exported["model"]).local(exported["model"]), house, load_spec(house.spec).train)
    records = house.metrics("warm-full")
    assert records[0]["loss"] == pytest.approx(wanted, abs=1e-6)
    assert records[0]["lr"] == pytest.approx(3e-3 / 4), "the learning rate is warmed up anew"
    with safe_open(house.root / "warm-full/checkpoints/step-2/state-rank-0.safetensors", framework="pt") as state:
        assert state.metadata()["steps"] == "2", "the optimizer counts its own steps, and begins with none"
    losses, digest = house.losses("warm-full"), warmed["model_digest"]

    place = house.root / "warm-source" / "checkpoints" / "fast-step-8"
    weights = place / "state-rank-0.safetensors"
    away = weights.rename(house.root / "warm-weights-away")
    try:
        house.back_to("warm-full", 2)
        again = house.train("warm-full", sets=begun(full))
    finally:
        away.rename(weights)
    assert (again["resumed_from"], again["model_digest"], house.losses("warm-full")) == (2, digest, losses)
    house.back_to("warm-full", 0)  # killed before its first checkpoint: it begins with the warm start once more
    again = house.train("warm-full", sets=begun(full))
    assert (again["resumed_from"], again["model_digest"], house.losses("warm-full")) == (None, digest, losses)

    events = read_events((house.root / "warm-full" / "events.jsonl").read_text())
    told = [event["warm_start"] for event in events if "warm_start" in event]
    assert [(one["checkpoint"], one["step"]) for one in told] == [(full, 8)] * 2, "not of the resume"
    model = store_for(warmed["model"]).require(warmed["model"], "model")
    assert model.inputs["warm_start"] == told[0]["digest"]
    assert full in (store_for(warmed["model"]).local(warmed["model"]) / "README.md").read_text()


@pytest.mark.integration
@pytest.mark.usefixtures("warmed")
def test_ranks_that_share_the_state_begin_as_one_rank_does(house: House, full: str) -> None:
    house.train("warm-shared", ranks=2, sets=begun(full, "train.zero_stage=2"))
    shared, alone = house.losses("warm-shared"), house.losses("warm-full")
    assert [loss for _, loss, _ in shared] == pytest.approx([loss for _, loss, _ in alone], abs=1e-6)


@pytest.mark.integration
def test_an_adapter_that_began_warm_is_published_and_loads(house: House, adapter: str, base: Path) -> None:
    """kohya-ss/musubi-tuner#909: trained on from an adapter, the first step was not that adapter's."""
    from peft import PeftModel

    house.train("warm-adapter", sets=begun(adapter, *LORA))
    last, first = house.losses("warm-source-lora")[-1], house.losses("warm-adapter")[0]
    assert first[1] < house.losses("warm-source-lora")[0][1], "it begins below where a fresh adapter does"
    assert first[1] == pytest.approx(last[1], rel=0.2)
    manifest = store_for(house.base).require(house.uri("warm-adapter"), "train")
    model = store_for(house.base).local(manifest.outputs["model"])
    folder = store_for(house.base).local(manifest.outputs["adapter"])
    merged = load(model, dtype=torch.float32, attention="eager").eval()
    beside = PeftModel.from_pretrained(load(base, dtype=torch.float32, attention="eager"), folder).eval()
    ids = torch.arange(1, 40)[None]
    with torch.no_grad():
        there, here = (one(input_ids=ids, use_cache=False).logits for one in (merged, beside))
    assert torch.allclose(there, here, atol=1e-4)


@pytest.mark.integration
def test_the_reference_of_a_preference_training_is_what_it_begins_with_and_not_the_base(
    house: House, adapter: str, base: Path
) -> None:
    """hiyouga/LlamaFactory#8459: over a supervised adapter, DPO's reference was silently the bare base model."""
    data = preference.commit(house.uri("warm-pairs"), base)
    pairs = replace(house, spec=preference.of_format(house, "preference"), data=data)
    sets = begun(adapter, *LORA, "train.objective=dpo", "train.validation.every_steps=2")
    pairs.train("warm-dpo", sets=sets)
    first = pairs.metrics("warm-dpo")[0]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["reward_margin"] == pytest.approx(0, abs=1e-6)
    records = pairs.metrics("warm-dpo")
    assert records[-1]["reward_margin"] > 0, "and then it learns"
    pairs.back_to("warm-dpo", 2)
    assert pairs.train("warm-dpo", sets=sets)["resumed_from"] == 2
    assert [record["loss"] for record in pairs.metrics("warm-dpo")] == [record["loss"] for record in records]


@pytest.mark.integration
def test_a_damaged_checkpoint_begins_nothing(house: House, full: str) -> None:
    hurt = house.root / "warm-hurt" / "checkpoints" / "fast-step-8"
    shutil.copytree(store_for(full).local(full), hurt)
    state = hurt / "state-rank-0.safetensors"
    data = bytearray(state.read_bytes())
    data[-100] ^= 1
    state.write_bytes(data)
    code, answer, _ = house.run("run", "--output", house.uri("warm-from-hurt"), sets=begun(hurt.as_uri()))
    assert code == 10
    assert "state-rank-0.safetensors differs from its hash" in answer["message"]
    assert not (house.root / "warm-from-hurt" / "metrics.jsonl").exists()


@pytest.mark.integration
def test_what_is_tried_before_begins_warm_too(house: House, full: str) -> None:
    code, answer, said = house.run("smoke", "--output", house.uri("warm-smoke"), sets=begun(full))
    assert code == 0, said
    assert answer["losses"][0] < 0.9 * house.losses("warm-source")[0][1], "of the same packs, by the base model"


def test_all_weights_of_a_checkpoint_are_counted(house: House, full: str) -> None:
    parameters = store_for(house.base).require(house.base, "model").facts["parameters"]
    assert warm.elements(store_for(full).local(full)) == parameters


def test_a_checkpoint_that_does_not_fit_is_refused_by_both_values(house: House, full: str, adapter: str) -> None:
    """jaredpalmer/kev#9: peft loads what matches and is silent about the rest, and a half-loaded adapter trains on."""
    for sets, said in (
        ((f"train.warm_start={adapter}",), ("is of method lora", "train.method is full")),
        ((f"train.warm_start={full}", *LORA), ("is of method full", "train.method is lora")),
        ((f"train.warm_start={adapter}", "train.method=lora"), ("adapter of rank 4", "train.lora.rank is 16")),
        ((f"train.warm_start={adapter}", *LORA, "train.lora.alpha=7"), ("of alpha 32.0", "train.lora.alpha is 7.0")),
    ):
        with pytest.raises(BadInput) as refused:
            locate(job_of(house, *sets))
        assert all(part in str(refused.value) for part in said), refused.value
        assert "train.warm_start" in str(refused.value)
    with pytest.raises(BadInput, match=r"is of the base model .*, train\.base holds other"):
        warm.fit(load_spec(house.spec, (f"train.warm_start={full}",)).train, "other")
    gone = full.replace("step-8", "step-3")
    with pytest.raises(BadInput, match="no checkpoint there"):
        locate(job_of(house, f"train.warm_start={gone}"))


def test_a_checkpoint_that_does_not_say_what_it_is_of_is_refused(house: House, full: str) -> None:
    old = house.root / "warm-old" / "checkpoints" / "fast-step-8"
    shutil.copytree(store_for(full).local(full), old)
    manifest = json.loads((old / "manifest.json").read_text())
    del manifest["facts"][warm.WEIGHTS_OF], manifest["seal"]
    (old / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BadInput, match="an older trainer wrote it"):
        warm.fit(load_spec(house.spec, (f"train.warm_start={old.as_uri()}",)).train, "b")


def test_a_warm_start_has_a_name_by_its_content_wherever_it_lies(house: House, full: str) -> None:
    def name(train: Train) -> str:
        return name_of(train, house.data, house.base)

    cold = load_spec(house.spec).train
    copy = house.root / "warm-elsewhere" / "fast-step-8"
    shutil.copytree(store_for(full).local(full), copy)
    here, there = (cold.model_copy(update={"warm_start": uri}) for uri in (full, copy.as_uri()))
    assert name(here) == name(there) != name(cold)
    with pytest.raises(ValueError, match="named by that checkpoint's content"):
        training_fingerprint(here, dataset="d", base="b")


def test_a_warm_start_is_never_at_the_full_rate_at_once_and_names_a_checkpoint() -> None:
    more: dict[str, Any] = {"base": "cache://m/x", "warm_start": "s3://b/run/checkpoints/step-400"}
    assert Train.model_validate({**more, "warmup_steps": 1}).warm_start
    with pytest.raises(ValidationError, match=r"train\.warmup_steps is 0.*Set train\.warmup_steps to 1"):
        Train.model_validate({**more, "warmup_steps": 0})
    for other in ("s3://b/run", "s3://b/run/checkpoints/step-400/manifest.json", "checkpoints/step-400"):
        with pytest.raises(ValidationError):
            Train.model_validate({**more, "warm_start": other})
