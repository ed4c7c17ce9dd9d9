"""Training on NVIDIA cards, on a machine that has one: `.venv-compute/bin/python -m pytest tests/train/test_cards.py`.

Elsewhere all of it is skipped, and says so. The processor's losses are what a card's are held against.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from conftest import House
from test_preference import commit, of_format

from refit.store import store_for

CARDS = torch.cuda.device_count() if torch.cuda.is_available() else 0

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(CARDS == 0, reason="no NVIDIA card here: training on cards is not tested"),
]
TWO = pytest.mark.skipif(CARDS < 2, reason="fewer than two NVIDIA cards here: ranks on cards are not tested")
FOUR_BITS = pytest.mark.skipif(not importlib.util.find_spec("bitsandbytes"), reason="bitsandbytes is not installed")

CARD = ("train.gpus_per_node=1",)
DROPOUT = ("train.method=lora", "train.lora.dropout=0.1", "train.dtype=bfloat16")


def near(house: House, mine: str, theirs: Sequence[tuple[int, float, float]], rel: float = 5e-3) -> None:
    """A card adds up in another order: a first step differs in the last digits, later ones by what grows of that."""
    own = house.losses(mine)
    assert own[0][1] == pytest.approx(theirs[0][1], rel=1e-4)
    assert own[0][2] == pytest.approx(theirs[0][2], rel=1e-3)
    assert [loss for _, loss, _ in own] == pytest.approx([loss for _, loss, _ in theirs], rel=rel)


def again_from_step_4(house: House, output: str, sets: tuple[str, ...], whole: dict[str, Any], ranks: int = 1) -> None:
    """As after a kill: the same steps, and the same model, to the bit."""
    undisturbed = house.losses(output)
    house.back_to(output, 4)
    again = house.train(output, ranks=ranks, sets=sets)
    assert again["resumed_from"] == 4
    assert house.losses(output) == undisturbed
    assert again["model_digest"] == whole["model_digest"]


@pytest.mark.parametrize("engine", ["plain", "deepspeed"])
def test_a_card_learns_what_a_processor_learns(house: House, trained: dict[str, Any], engine: str) -> None:
    output = f"card-{engine}"
    answer = house.train(output, sets=(*CARD, f"train.engine={engine}", "train.validation.every_steps=4"))
    near(house, output, house.losses("alone"))
    assert answer["steps"] == trained["steps"]
    for record in house.metrics(output):
        inside = [record[part] for part in ("data", "forward", "backward", "communication", "wait", "optimizer")]
        assert min(inside) > -1e-3, "parts are told by the card's own clock, to half a microsecond"
        assert sum(inside) <= record["seconds"] * 1.01
        assert record["forward"] + record["backward"] > 0
        assert record["device_peak"] > 8 << 20, "weights, gradients and moments of two million bytes each"


def test_a_look_at_the_validation_split_sees_on_a_card_what_it_sees_on_a_processor(house: House) -> None:
    sets = ("train.validation.every_steps=1", "train.max_steps=2", "train.learning_rate=1.0e-6")
    for output, more in (("look-processor", ()), ("look-card", CARD)):
        house.train(output, sets=(*sets, *more))
    seen, wanted = ([r["validation_loss"] for r in house.metrics(f"look-{kind}")] for kind in ("card", "processor"))
    assert seen == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize(("engine", "stage", "more"), [
    ("plain", 0, ()),
    ("plain", 0, DROPOUT),
    ("deepspeed", 0, ()),
    ("deepspeed", 1, ()),
    ("deepspeed", 2, DROPOUT),
    ("deepspeed", 3, ()),
    ("deepspeed", 3, DROPOUT),
])  # fmt: skip
def test_a_training_on_a_card_goes_on_to_the_bit(house: House, engine: str, stage: int, more: tuple[str, ...]) -> None:
    """With dropout the card's own random numbers must have been saved."""
    output = f"card-exact-{engine}-{stage}-{'lora' if more else 'full'}"
    sets = (*CARD, *more, f"train.engine={engine}", f"train.zero_stage={stage}")
    whole = house.train(output, sets=sets)
    states = [json.loads(path.read_text()) for path in (house.root / output).glob("checkpoints/step-*/rng-rank-0.json")]
    assert states
    assert all("card" in state for state in states)
    again_from_step_4(house, output, sets, whole)


def test_a_checkpoint_of_a_processor_is_gone_on_from_by_a_card_and_back(house: House, trained: dict[str, Any]) -> None:
    theirs = house.losses("alone")
    shutil.copytree(house.root / "alone", house.root / "to-card")
    house.back_to("to-card", 4)
    assert house.train("to-card", sets=CARD)["resumed_from"] == 4
    assert [loss for _, loss, _ in house.losses("to-card")] == pytest.approx([loss for _, loss, _ in theirs], rel=5e-3)
    house.back_to("to-card", 8)
    assert house.train("to-card")["resumed_from"] == 8
    assert [loss for _, loss, _ in house.losses("to-card")] == pytest.approx([loss for _, loss, _ in theirs], rel=5e-3)


@TWO
@pytest.mark.parametrize(("stage", "parallel"), [(0, 1), (1, 1), (2, 1), (3, 1), (1, 2)])
def test_two_cards_learn_what_a_processor_learns_and_go_on_to_the_bit(
    house: House, trained: dict[str, Any], stage: int, parallel: int
) -> None:
    output = f"cards-{stage}-{parallel}"
    sets = ("train.gpus_per_node=2", f"train.zero_stage={stage}", f"train.tensor_parallel={parallel}")
    whole = house.train(output, ranks=2, sets=sets)
    near(house, output, house.losses("alone"))
    assert all(record["communication"] > 0 for record in house.metrics(output))
    again_from_step_4(house, output, sets, whole, ranks=2)


@pytest.mark.parametrize(("stage", "offload"), [(1, "optimizer"), (2, "optimizer"), (3, "all")])
def test_what_is_offloaded_learns_the_same_and_goes_on_to_the_bit(
    house: House, trained: dict[str, Any], stage: int, offload: str
) -> None:
    output = f"card-offload-{stage}"
    sets = (*CARD, f"train.zero_stage={stage}", f"train.offload={offload}")
    whole = house.train(output, sets=sets)
    near(house, output, house.losses("alone"))
    again_from_step_4(house, output, sets, whole)


@FOUR_BITS
@pytest.mark.parametrize("stage", [0, 2])
def test_a_base_in_four_bits_is_adapted_published_and_gone_on_from(house: House, stage: int) -> None:
    """That the merged model answers like the adapter on the whole base, the export itself has proved."""
    output = f"card-four-bits-{stage}"
    sets = (*CARD, "train.method=qlora", "train.dtype=bfloat16", f"train.zero_stage={stage}")
    whole = house.train(output, sets=sets)
    losses = [loss for _, loss, _ in house.losses(output)]
    assert losses[-1] < losses[0]
    assert store_for(whole["adapter"]).manifest(whole["adapter"]) is not None
    assert store_for(whole["model"]).manifest(whole["model"]) is not None
    again_from_step_4(house, output, sets, whole)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_preferences_are_learnt_on_a_card_as_on_a_processor(house: House, method: str) -> None:
    """Full: the base's answers are computed on the card before. LoRA: the adapter is switched off there."""
    base = store_for(house.base).local(house.base)
    data = commit(house.uri(f"card-pairs-{method}/data"), base)
    pairs = House(house.root, of_format(house, "preference"), house.base, data)
    sets = ("train.objective=dpo", f"train.method={method}", "train.max_steps=4", "train.learning_rate=1.0e-4",
            "train.overfit.steps=0", "train.validation.every_steps=2")  # fmt: skip
    for kind, more in (("processor", ()), ("card", CARD)):
        pairs.train(f"pairs-{method}-{kind}", sets=(*sets, *more))
    near(house, f"pairs-{method}-card", house.losses(f"pairs-{method}-processor"))
    seen, wanted = (
        [r["validation_loss"] for r in house.metrics(f"pairs-{method}-{kind}") if "validation_loss" in r]
        for kind in ("card", "processor")
    )
    assert seen == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_smoke_run_on_a_card_restores_to_the_bit_and_tells_its_memory(house: House, stage: int) -> None:
    code, answer, said = house.run(
        "smoke", "--output", house.uri(f"card-smoke-{stage}"), sets=(*CARD, f"train.zero_stage={stage}")
    )
    assert code == 0, said
    assert 0 < answer["device_peak"] < 2 << 30


FULL = """
import json, os, sys, torch
from trainer import device, work
from trainer.task import Task, Wire
from refit.errors import PreflightRefused
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "DS_ACCELERATOR": "cuda", "MASTER_ADDR": "127.0.0.1",
               "MASTER_PORT": "0"}
task = Task.model_validate(json.load(open(sys.argv[1])) | {"checkpoint": None, "step": 0})
choose = device.choose
def small(train):
    choose(train)
    torch.cuda.set_per_process_memory_fraction(4e6 / torch.cuda.get_device_properties(0).total_memory)
device.choose = small
try:
    work.run(task, Wire(), lambda: 0.0)
except PreflightRefused as error:
    print(json.dumps(str(error)))
"""


@pytest.mark.parametrize("engine", ["plain", "deepspeed"])
def test_a_card_that_is_full_is_told_with_what_to_lower(house: House, engine: str) -> None:
    """Four megabytes of it are given to a training that takes more: torch's own refusal, on a real card."""
    output = f"card-full-{engine}"
    house.train(output, sets=(*CARD, f"train.engine={engine}", "train.max_steps=1"))
    document = house.root / output / "ranks" / "task.json"
    done = subprocess.run([sys.executable, "-c", FULL, str(document)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.strip().splitlines()[-1])
    assert "the card's memory is too small. Lower train.micro_batch (now 2" in told


def test_auto_is_bfloat16_on_a_card_that_computes_in_it(house: House) -> None:
    house.train("card-auto", sets=(*CARD, "train.dtype=auto", "train.max_steps=2", "train.checkpoint.every_steps=2"))
    manifest = store_for(house.base).require(house.uri("card-auto/checkpoints/step-2"), "checkpoint")
    able = torch.cuda.get_device_capability(0) >= (8, 0)
    assert manifest.facts["dtype"] == ("bfloat16" if able else "float32")
