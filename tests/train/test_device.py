"""What a rank computes on, as far as a machine without a card can show it; with one see test_cards.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import House
from pydantic import ValidationError
from torch import distributed

from refit.errors import BadSpec, PreflightRefused
from refit.job import Job
from refit.pipeline import load as load_spec
from refit.spec import Train
from trainer import device, gpus, machine, memory, objective, randomness, tried
from trainer.batches import to_batch
from trainer.gpus import Cards, Gpu
from trainer.inputs import supported
from trainer.parts import Parts
from trainer.preflight import need_of
from trainer.randomness import Numbers
from trainer.ranks import environment
from trainer.task import Task

NO_CARD = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a card: it would be used")
GIB = 1 << 30


def recipe(**fields: Any) -> Train:
    return Train(base="cache://models/x", **fields)


def test_each_rank_has_a_card_of_its_own() -> None:
    recipe(gpus_per_node=2, ranks=2, accumulation=2)
    recipe(gpus_per_node=8, ranks=1)
    recipe(gpus_per_node=4, nodes=2, ranks=8, accumulation=8)
    with pytest.raises(ValidationError, match=r"train\.ranks is 2, train\.gpus_per_node is 1 .* Lower train\.ranks"):
        recipe(gpus_per_node=1, ranks=2, accumulation=2)


def test_a_recipe_for_cards_may_be_planned_where_there_are_none() -> None:
    """In a cluster the plan's pod asks for no card."""
    for fields in ({}, {"method": "qlora"}, {"offload": "all", "zero_stage": 3}):
        supported(recipe(gpus_per_node=1, **fields))
    with pytest.raises(BadSpec, match=r"train\.nodes is 2"):
        supported(recipe(gpus_per_node=1, nodes=2))


@NO_CARD
def test_a_rank_without_its_card_says_where_and_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(PreflightRefused, match=r"torch .* finds 0 card\(s\) here; rank 0 needs one of its own"):
        device.choose(recipe(gpus_per_node=1))
    assert not torch.are_deterministic_algorithms_enabled()
    device.choose(recipe())
    assert (device.here(), device.on_card(), device.backend()) == (torch.device("cpu"), False, "gloo")


@NO_CARD
@pytest.mark.integration
def test_a_run_on_cards_that_are_not_there_is_refused_and_not_tried_again(house: House) -> None:
    code, answer, _ = house.run("run", "--output", house.uri("no-card"), sets=("train.gpus_per_node=1",))
    assert (code, "finds 0 card(s) here" in answer["message"]) == (11, True)
    events = [json.loads(line) for line in (house.root / "no-card" / "events.jsonl").read_text().splitlines()]
    assert "retrying" not in [event["state"] for event in events]


CLOSED = """
import gc, json, os, sys, torch
from trainer import engines
from trainer.loop import Loop
from trainer.samples import loader_of
from trainer.task import Task, Wire
from trainer.work import _engine
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1",
               "MASTER_PORT": "0"}
document = json.load(open(sys.argv[1])) | {"checkpoint": None, "step": 0}
held = {}
gc.disable()
for engine, stage, method in (("deepspeed", 0, "full"), ("deepspeed", 2, "full"), ("deepspeed", 3, "full"),
                              ("deepspeed", 3, "lora"), ("plain", 0, "full"), ("plain", 0, "lora")):
    document["job"]["spec"]["train"] |= {"engine": engine, "zero_stage": stage, "method": method}
    task = Task.model_validate(document)
    if not torch.distributed.is_initialized():
        engines.connect(task.train, task.rendezvous, 0, 1)
    loader = loader_of(task, 0, lambda: None)
    made = _engine(task, loader)
    loop = Loop(made, loader, task, Wire())
    loop.step(0)
    made.close()
    del made, loop, loader  # and the steps that it has made ahead
    storages = [one.untyped_storage() for one in gc.get_objects() if isinstance(one, torch.Tensor)]
    held[f"{engine} {method} {stage}"] = sum({one._cdata: one.nbytes() for one in storages}.values())
print(json.dumps(held))
"""


@pytest.mark.integration
def test_an_engine_that_is_closed_gives_its_memory_back(house: House, trained: dict[str, Any]) -> None:
    """A smoke run makes a second one: on a card with room for one training there must not be two."""
    document = house.root / "alone" / "ranks" / "task.json"
    copy = json.loads(document.read_text()) | {"rendezvous": str(house.root / "closed-meeting")}
    (house.root / "closed.json").write_text(json.dumps(copy))
    done = subprocess.run(
        [sys.executable, "-c", CLOSED, str(house.root / "closed.json")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    held = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(held) == 6
    assert max(held.values()) < 100_000, f"{held}; the model alone takes two million bytes"


@pytest.mark.integration
def test_ranks_are_told_what_deepspeed_drives(house: House) -> None:
    job = Job.build(
        "train", load_spec(house.spec), store=house.uri("store"), output=house.uri("told"),
        inputs={"dataset": house.data, "base": house.base},
    )  # fmt: skip

    def found(cards: int) -> dict[str, str]:
        train = job.spec.train.model_copy(update={"gpus_per_node": cards})
        spec = job.spec.model_copy(update={"train": train})
        task = Task(
            mode="train", job=job.model_copy(update={"spec": spec}), fingerprint="f", dataset=Path("d"), base=Path("b"),
            folder=Path("o"), dtype="float32", token="", ranks=1, rendezvous=Path("r"),
        )  # fmt: skip
        return environment(task, 0, 3)

    assert found(0)["DS_ACCELERATOR"] == "cpu"
    assert found(1) == found(0) | {"DS_ACCELERATOR": "cuda"}


def test_a_processor_is_handed_nothing_over() -> None:
    tokens = torch.ones((1, 8), dtype=torch.int64).numpy()
    batch = to_batch(tokens, tokens, tokens)
    assert device.put(batch) is batch
    assert (device.random_state(), device.memory()) == (None, {})
    device.set_random_state(torch.zeros(16, dtype=torch.uint8))


def test_attention_is_a_processors_choice_only_on_one() -> None:
    lengths = (128, objective.EAGER_LENGTH, 4096)
    assert [objective.attention_for(length) for length in lengths] == ["eager", "eager", "sdpa"]
    assert {objective.attention_for(length, card=True) for length in lengths} == {"sdpa"}


def test_random_numbers_of_a_card_stand_beside_the_others_and_are_passed_over_without_one() -> None:
    torch.manual_seed(5)
    state = json.loads(json.dumps(Numbers.now().document()))
    assert set(state) == {"torch", "numpy", "python"} | ({"card"} if device.on_card() else set())
    first = torch.randn(3).tolist()
    randomness.go_on(state | {"card": randomness.text(torch.zeros(16, dtype=torch.uint8))})
    assert torch.randn(3).tolist() == first


def test_the_parts_of_a_step_follow_each_other_and_collectives_are_told_apart() -> None:
    from trainer.collectives import CLOCK

    say = CLOCK.timed(lambda: sum(range(200_000)))
    parts = Parts()
    with parts.clock("data"):
        say()  # DeepSpeed does not talk there: it counts as data
    for _ in range(2):
        with parts.clock("forward"):
            say()
    with pytest.raises(ZeroDivisionError), parts.clock("backward"):
        raise ZeroDivisionError
    spent = parts.take()
    assert set(spent) == {"data", "forward", "backward", "communication"}
    assert spent["communication"] > spent["forward"] >= 0
    assert parts.take() == {}


@pytest.mark.parametrize(("capabilities", "used", "dtype", "expected"), [
    ([(9, 0), (8, 0)], 2, "auto", "bfloat16"),
    ([(8, 0), (7, 5)], 2, "auto", "float32"),
    ([(8, 0), (7, 5)], 1, "auto", "bfloat16"),
    ([], 1, "auto", "bfloat16"),
    ([None], 1, "auto", "bfloat16"),
    ([(7, 5)], 1, "bfloat16", "bfloat16"),
    ([(9, 0)], 1, "float32", "float32"),
])  # fmt: skip
def test_auto_computes_in_bfloat16_where_the_cards_do(
    capabilities: list[tuple[int, int] | None], used: int, dtype: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cards that are not seen are those of another machine, and taken for new ones."""
    cards = Cards(gpus=tuple(Gpu(name="x", memory=1, capability=one) for one in capabilities))
    monkeypatch.setattr(gpus, "look", lambda: cards)
    monkeypatch.setattr(machine, "flags", frozenset)
    assert machine.arithmetic(recipe(dtype=dtype, gpus_per_node=used)) == expected
    assert machine.arithmetic(recipe()) == "float32"


def test_what_was_tried_on_other_cards_says_nothing_of_these(monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for card in ("NVIDIA L4", "NVIDIA H100"):
        monkeypatch.setattr(gpus, "look", lambda name=card: Cards(gpus=(Gpu(name=name, memory=1),)))
        names |= {tried.name("smoke", recipe(gpus_per_node=1), "t"), tried.name("smoke", recipe(), "t")}
    assert len(names) == 3, "a processor's answer does not depend on cards that it leaves alone"


KINDS = {"weights": 100, "gradients": 40, "optimizer": 60, "activations": 500, "logits": 7, "save": 30, "runtime": 1}


@pytest.mark.parametrize(("fields", "cards", "least"), [
    ({}, 0, 0),
    ({"gpus_per_node": 1}, 707, 200),
    ({"gpus_per_node": 1, "zero_stage": 2, "offload": "optimizer"}, 607, 100),
    ({"gpus_per_node": 1, "zero_stage": 3, "offload": "all"}, 507, 100),
    ({"gpus_per_node": 4, "ranks": 4, "accumulation": 4, "zero_stage": 3}, 707, 400),
])  # fmt: skip
def test_memory_is_looked_for_where_it_is_taken(fields: dict[str, Any], cards: int, least: int, tmp_path: Path) -> None:
    """ZeRO 3 shares out a model that was whole on a card before."""
    train = recipe(**fields)
    assert sum(memory.on_cards(train, KINDS).values()) == cards
    need = need_of(train, {"bytes_per_rank": KINDS, "checkpoint_bytes": 1, "parameters": 1}, tmp_path.as_uri())
    assert (need.memory_per_rank, need.memory_per_card) == (sum(KINDS.values()) - cards, least)


@pytest.mark.parametrize(("fields", "said", "unsaid"), [
    ({"method": "full", "micro_batch": 4}, ("train.micro_batch (now 4", "train.offload", "train.method lora"),
     ("zero_stage",)),
    ({"method": "full", "micro_batch": 1, "ranks": 2, "gpus_per_node": 2, "accumulation": 2, "zero_stage": 1},
     ("Lower data.pack_length", "a higher train.zero_stage"), ("micro_batch",)),
    ({"method": "qlora", "micro_batch": 1, "zero_stage": 1, "offload": "optimizer"},
     ("Lower data.pack_length; or set train.checkpoint_activations.",), ("zero_stage",)),
    ({"method": "qlora", "micro_batch": 1, "zero_stage": 1, "offload": "optimizer", "checkpoint_activations": True},
     ("Lower data.pack_length.",), ("or set",)),
])  # fmt: skip
def test_a_card_that_is_full_is_told_with_what_takes_less(
    fields: dict[str, Any], said: tuple[str, ...], unsaid: tuple[str, ...]
) -> None:
    told = device.explained(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), recipe(**fields))
    assert isinstance(told, PreflightRefused)
    assert all(part in str(told) for part in (*said, "Tried to allocate 2 GiB"))
    assert not any(part in str(told) for part in unsaid)
    assert "too small" in str(device.explained(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), recipe()))
    assert device.explained(RuntimeError("something else"), recipe()) is None


def test_what_cannot_be_repeated_is_refused_by_torchs_own_words() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError) as raised:
            torch.nn.functional.max_unpool2d(torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1, 1, dtype=torch.int64), 2)
    finally:
        torch.use_deterministic_algorithms(False)
    assert "cannot repeat to the bit" in str(device.explained(raised.value, recipe()))


def test_a_group_that_knows_both_devices_keeps_what_is_the_hosts_with_gloo(tmp_path: Path) -> None:
    """As on cards, but that here gloo stands on both sides: barriers and objects ask for the processor's."""
    distributed.init_process_group("cpu:gloo,cuda:gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        votes = torch.tensor([1.5, 0.0], dtype=torch.float64)
        inner = distributed.new_group([0])
        for group in (None, inner):
            distributed.all_reduce(votes, group=group)
            distributed.barrier(group=group)
            told: list[Any] = [None]
            distributed.all_gather_object(told, {"a": 1}, group=group)
            assert told == [{"a": 1}]
        assert votes.tolist() == [1.5, 0.0]
    finally:
        distributed.destroy_process_group()
