"""Who trains: DeepSpeed, or one process with torch alone. The weights do not tell."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys

import pytest
import tickets
import torch
from conftest import House
from pydantic import ValidationError
from torch import nn

from refit.errors import BadSpec, Diverged, PreflightRefused
from refit.fingerprint import training_fingerprint
from refit.spec import Train
from refit.store import store_for
from trainer import export, quantized
from trainer.batches import to_batch
from trainer.inputs import supported
from trainer.plain import PlainEngine

RECIPES = {
    "full": ("train.method=full", "train.weight_decay=0.1", "train.clip=4", "train.max_steps=8"),
    "lora": ("train.method=lora", "train.lora.dropout=0.1", "train.dtype=bfloat16", "train.max_steps=8"),
}


def test_the_engine_is_no_part_of_a_models_name_and_plain_is_alone() -> None:
    names = {
        training_fingerprint(Train(base="cache://models/x", engine=engine), dataset="d", base="b")
        for engine in ("auto", "deepspeed", "plain")
    }
    assert len(names) == 1
    with pytest.raises(ValidationError, match=r"train\.engine is plain, train\.ranks is 2"):
        Train(base="cache://models/x", engine="plain", ranks=2, accumulation=2)
    with pytest.raises(ValidationError, match=r"train\.zero_stage is 1"):
        Train(base="cache://models/x", engine="plain", zero_stage=1)


@pytest.mark.integration
@pytest.mark.parametrize("recipe", RECIPES)
def test_both_engines_train_the_same_to_the_bit_and_go_on_from_each_others_checkpoints(
    house: House, recipe: str
) -> None:
    answers = {}
    for engine in ("plain", "deepspeed"):
        answers[engine] = house.train(f"engine-{engine}-{recipe}", sets=(*RECIPES[recipe], f"train.engine={engine}"))
    plain, deepspeed = answers["plain"], answers["deepspeed"]
    undisturbed = house.losses(f"engine-plain-{recipe}")
    assert undisturbed == house.losses(f"engine-deepspeed-{recipe}")
    assert plain["model_digest"] == deepspeed["model_digest"]
    for first, then in (("plain", "deepspeed"), ("deepspeed", "plain")):
        output = f"engine-{first}-{recipe}"
        house.back_to(output, 4)
        again = house.train(output, sets=(*RECIPES[recipe], f"train.engine={then}"))
        assert (again["resumed_from"], again["model_digest"]) == (4, plain["model_digest"])
        assert house.losses(output) == undisturbed


WATCHED = """
import gc, os, sys
from pathlib import Path
from trainer import imports
from trainer.task import Task, Wire
task = Task.model_validate_json(Path(sys.argv[1]).read_bytes())
imports.of(task)
print(gc.isenabled(), gc.get_freeze_count() > 100_000)
before = set(sys.modules)
os.environ["RANK"] = "0"
from trainer import work
work.run(task, Wire(), lambda: False)
print(sorted(name for name, module in sys.modules.items() if name.partition(".")[0] == "deepspeed" and module))
print({"accelerate", "peft", "torch", "transformers"} - before)
"""


@pytest.mark.integration
def test_a_plain_training_imports_nothing_of_deepspeed_and_the_rest_at_once(house: House) -> None:
    """From the first step to the published model: accelerate imports it when it saves, if it is installed.

    What comes later than the rest is looked through by the garbage collector again and again.
    """
    sets = ("train.max_steps=2", "train.method=lora")
    house.train("engine-alone", sets=sets)
    task = json.loads((house.root / "engine-alone" / "ranks" / "task.json").read_text())
    task |= {"checkpoint": None, "step": 0}
    document = house.root / "engine-alone" / "again.json"
    document.write_text(json.dumps(task))
    done = subprocess.run([sys.executable, "-c", WATCHED, str(document)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-3:] == ["True True", "[]", "set()"]


def test_a_plain_engine_takes_no_step_on_a_gradient_that_is_not_finite() -> None:
    """And shows whose it was: one infinite gradient must not have become everybody's by clipping."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    engine = PlainEngine(module, Train(base="cache://models/x"))
    before = [parameter.detach().clone() for parameter in module.parameters()]
    engine.backward(engine.loss(torch.ones(1, 2)).sum(), 1.0, last=False)
    module[1].bias.grad.fill_(math.inf)
    with pytest.raises(Diverged, match="not finite"):
        engine.update(0.1)
    assert all(map(torch.equal, before, module.parameters()))
    assert [name for name, norm in engine.gradient_norms() if not math.isfinite(norm)] == ["1.bias"]
    engine.skip()
    assert not any(parameter.grad is not None and parameter.grad.any() for parameter in module.parameters()), "leaks"


@pytest.mark.parametrize(("fields", "card", "message"), [
    ({}, True, "train.gpus_per_node is 0"),
    ({"gpus_per_node": 1}, False, "torch finds no card"),
    ({"gpus_per_node": 1}, True, "bitsandbytes_that_nobody_has is not installed"),
])  # fmt: skip
def test_four_bits_are_refused_where_there_is_no_card_or_no_library(
    fields: dict[str, int], card: bool, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: card)
    monkeypatch.setattr(quantized, "LIBRARY", "bitsandbytes_that_nobody_has")
    with pytest.raises(PreflightRefused, match=message):
        quantized.check(Train(base="cache://models/x", method="qlora", **fields))
    with pytest.raises(PreflightRefused, match="need a card"):
        supported(Train(base="cache://models/x", method="qlora"))
    with pytest.raises(ValidationError, match="not shared out"):
        Train(base="cache://models/x", method="qlora", zero_stage=3)


@pytest.mark.integration
def test_a_run_in_four_bits_on_a_processor_ends_before_it_starts(house: House) -> None:
    code, answer, _ = house.run("run", "--output", house.uri("four-bits"), sets=("train.method=qlora",))
    assert (code, "need a card" in answer["message"]) == (11, True)
    assert not (house.root / "four-bits" / "checkpoints").exists()


@pytest.mark.integration
def test_an_adapter_over_the_whole_base_answers_like_the_model_it_is_merged_into(house: House) -> None:
    """What QLoRA's export is proven by; LoRA's adapter is of the same kind."""
    answer = house.train("unmerged", sets=("train.method=lora", "train.max_steps=4", "train.learning_rate=0.01"))
    base, adapter, merged = (store_for(uri).local(uri) for uri in (house.base, answer["adapter"], answer["model"]))
    batch = to_batch(*tickets.pack(tickets.documents(base, 8), tickets.LENGTH))
    apart = export.unmerged(base, adapter, batch, tickets.LENGTH)
    assert export._difference(apart, merged, batch, tickets.LENGTH) < 1e-5
    assert export._difference(apart, base, batch, tickets.LENGTH) > 1e-2, "or the adapter says nothing"


def test_offloading_is_refused_where_zero_has_nothing_to_offload_and_on_a_processor() -> None:
    for offload, stage in (("optimizer", 0), ("all", 2)):
        with pytest.raises(ValidationError, match=f"train.offload is {offload} and train.zero_stage is {stage}"):
            Train(base="cache://models/x", offload=offload, zero_stage=stage)
    with pytest.raises(BadSpec, match="nothing to offload"):
        supported(Train(base="cache://models/x", offload="all", zero_stage=3))


@pytest.mark.integration
@pytest.mark.parametrize(("stage", "offload"), [(2, "optimizer"), (3, "all")])
def test_offloading_takes_the_same_steps_and_goes_on_to_the_bit(house: House, stage: int, offload: str) -> None:
    """By the ranks themselves, for the trainer refuses it here: on a processor it copies within one memory."""
    output = f"offload-{stage}-none"
    if not (house.root / output).exists():
        house.train(output, sets=(f"train.zero_stage={stage}", "train.max_steps=6", "train.clip=4"))
    undisturbed = [record["loss"] for record in house.metrics(output)]
    folder = house.root / f"offload-{stage}-{offload}"
    task = json.loads((house.root / output / "ranks" / "task.json").read_text())
    folder.mkdir()
    shutil.copy(house.root / output / "writer.json", folder)
    task["job"]["spec"]["train"]["offload"] = offload
    task["job"]["output"] = folder.as_uri()
    task |= {"folder": str(folder), "rendezvous": str(folder / "rendezvous")}
    for checkpoint, step in ((None, 0), ((folder / "checkpoints" / "step-4").as_uri(), 4)):
        (folder / "task.json").write_text(json.dumps(task | {"checkpoint": checkpoint, "step": step}))
        done = subprocess.run(
            [sys.executable, "-m", "trainer.rank", str(folder / "task.json")], capture_output=True, text=True,
            check=False, env={**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "DS_ACCELERATOR": "cpu",
                              "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
    records = [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert records[:6] == pytest.approx(undisturbed, rel=1e-6), "ZeRO 3 adds the norm up in another order"
    assert records[6:] == records[4:6]
