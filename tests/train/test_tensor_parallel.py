"""Several ranks holding each matrix together learn what one rank learns."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import House, call
from pydantic import ValidationError
from safetensors.torch import load_file
from transformers import GPT2Config, LlamaConfig

from refit.errors import BadInput
from refit.spec import Train
from refit.store import store_for
from trainer import plan, preflight, tensor_parallel
from trainer.fragments import KINDS, Fragment, Window
from trainer.gpus import Cards, Gpu
from trainer.judge import judge
from trainer.packs import Packs
from trainer.reports import Report
from trainer.shapes import model_of
from trainer.state import Reader, State

RECIPE = ("train.zero_stage=1", "train.max_steps=8", "train.validation.every_steps=4")
CUT = (*RECIPE, "train.tensor_parallel=2")


def weights(answer: dict[str, Any]) -> dict[str, torch.Tensor]:
    return load_file(store_for(answer["model"]).local(answer["model"]) / "model.safetensors")


def agrees(house: House, output: str, other: str) -> None:
    """Float32 sums in another order, and what Adam makes of it in eight steps."""
    for mine, alone in zip(house.metrics(output), house.metrics(other), strict=True):
        assert mine["loss"] == pytest.approx(alone["loss"], rel=2e-6)
        assert mine["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-5)
        assert mine.get("validation_loss", 0.0) == pytest.approx(alone.get("validation_loss", 0.0), rel=2e-6)
        assert mine["tokens"] == alone["tokens"]


@pytest.fixture(scope="module")
def cut(house: House) -> dict[str, Any]:
    """On two ranks that hold each matrix together, looking at the validation split too."""
    return house.train("cut", ranks=2, sets=CUT)


@pytest.fixture(scope="module")
def uncut(house: House) -> dict[str, Any]:
    return house.train("uncut", sets=RECIPE)


@pytest.mark.integration
def test_two_ranks_that_share_each_matrix_learn_what_one_learns(
    house: House, cut: dict[str, Any], uncut: dict[str, Any]
) -> None:
    agrees(house, "cut", "uncut")
    start = load_file(store_for(house.base).local(house.base) / "model.safetensors")
    apart, moved = 0.0, 0.0
    for name, value in weights(uncut).items():
        apart += float((weights(cut)[name] - value).double().square().sum())
        moved += float((value - start[name]).double().square().sum())
    assert (apart / moved) ** 0.5 < 1e-5, "of the way that the weights went"
    places = [house.root / "cut" / "checkpoints" / "step-8" / f"state-rank-{rank}.safetensors" for rank in (0, 1)]
    sizes = [{key.partition("@")[0]: len(value) for key, value in load_file(place).items()} for place in places]
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
        halves = [held[key] for held in sizes for key in held if key.endswith(f"layers.1.{name}.weight")]
        assert halves == [start[f"model.layers.1.{name}.weight"].numel() // 2] * 2, "or nothing was cut or proven"


@pytest.mark.integration
def test_what_is_counted_as_cut_is_what_deepspeed_cuts(house: House, cut: dict[str, Any]) -> None:
    """The second rank of the only group saves its shards and nothing else."""
    held = load_file(house.root / "cut" / "checkpoints" / "step-8" / "state-rank-1.safetensors")
    weights_of_one = sum(len(value) for key, value in held.items() if "@" in key and key.endswith("weight"))
    model = model_of(store_for(house.base).local(house.base))
    assert tensor_parallel.cut(model) == 2 * weights_of_one > 0


@pytest.mark.integration
def test_a_cut_training_goes_on_from_its_checkpoint_to_the_bit_and_on_one_rank(
    house: House, cut: dict[str, Any], uncut: dict[str, Any]
) -> None:
    shutil.copytree(house.root / "cut", house.root / "cut-on")
    house.back_to("cut-on", 4)
    again = house.train("cut-on", ranks=2, sets=CUT)
    assert (again["resumed_from"], again["model_digest"]) == (4, cut["model_digest"])
    assert house.losses("cut-on") == house.losses("cut")
    house.back_to("cut-on", 4)
    alone = house.train("cut-on", sets=RECIPE)
    assert alone["resumed_from"] == 4
    agrees(house, "cut-on", "uncut")


@pytest.mark.integration
def test_a_cut_checkpoint_is_exported_as_the_model_that_its_training_published(
    house: House, cut: dict[str, Any]
) -> None:
    program = house.argv("run")[:3]
    argv = [*program, "export", house.uri("cut/checkpoints/step-8"), "--output", house.uri("cut-exported")]
    code, answer, said = call(argv)
    assert code == 0, said
    assert (answer["ranks"], answer["model_digest"]) == (2, cut["model_digest"])


@pytest.mark.integration
def test_groups_of_ranks_share_the_packs_out_and_go_on_from_what_one_rank_saved(
    house: House, uncut: dict[str, Any]
) -> None:
    shutil.copytree(house.root / "uncut", house.root / "cut-in-groups")
    house.back_to("cut-in-groups", 4)
    answer = house.train("cut-in-groups", ranks=4, sets=CUT)
    assert answer["resumed_from"] == 4
    agrees(house, "cut-in-groups", "uncut")


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("sizes", [(3, 3), (4, 2), (1, 2, 3)])
@pytest.mark.parametrize("stretches", [1, 2, 5])
def test_shards_are_read_back_as_the_whole_and_as_other_shards(
    tmp_path: Path, dim: int, sizes: tuple[int, ...], stretches: int
) -> None:
    """Each rank of a group writes its shard, shared out among several by ZeRO in stretches."""
    whole = torch.arange(36.0).view(6, 6)
    for rank, shard in enumerate(whole.split(sizes, dim=dim)):
        flat, window = shard.reshape(-1), window_of(dim, sizes, rank)
        start, step = 0, -(-len(flat) // stretches)
        for number, part in enumerate(flat.split(step)):
            piece = Fragment("w", start, dict.fromkeys(KINDS, part)).seen(window, len(flat))
            State.of([piece], 3).write(tmp_path, rank * stretches + number)
            start += len(part)
    with Reader(tmp_path) as reader:
        assert torch.equal(reader.whole("w", 36), whole.view(-1))
        assert torch.equal(reader.read("w", "exp_avg", 5, 14), whole.view(-1)[5:19])
        for other in (0, 1):
            for rank, shard in enumerate(whole.split((2, 4), dim=other)):
                flat = shard.reshape(-1)
                place = window_of(other, (2, 4), rank)
                assert torch.equal(reader.seen("w", "weight", 0, len(flat), place), flat)
                assert torch.equal(reader.seen("w", "weight", 3, 5, place), flat[3:8])
        with pytest.raises(BadInput, match="elements of w"):
            reader.whole("w", 37)


def window_of(dim: int, sizes: tuple[int, ...], rank: int) -> Window:
    inner = 6 if dim == 0 else 1
    return Window(sum(sizes[:rank]) * inner, sizes[rank] * inner, 6 * inner)


@pytest.mark.parametrize(("fields", "message"), [
    ({"ranks": 3, "accumulation": 3}, "train.ranks is 3 and train.tensor_parallel is 2"),
    ({"ranks": 4, "accumulation": 3}, "train.accumulation is 3"),
    ({"ranks": 2, "method": "lora"}, "with train.method lora"),
    ({"ranks": 2, "zero_stage": 0}, "train.zero_stage 0"),
    ({"ranks": 2, "zero_stage": 3}, "train.zero_stage 3"),
])  # fmt: skip
def test_what_tensor_parallelism_does_not_go_with_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Train(**{"base": "cache://models/x", "method": "full", "zero_stage": 1, "tensor_parallel": 2} | fields)


GIB = 1 << 30
LLAMA_13B = LlamaConfig(
    hidden_size=5120, intermediate_size=13824, num_hidden_layers=40, num_attention_heads=40, num_key_value_heads=40
)


def of_13b(folder: Path, together: int, stage: int = 1) -> tuple[Train, dict[str, Any]]:
    """A full training on eight cards, and its plan."""
    LLAMA_13B.save_pretrained(folder)
    train = Train(
        base="cache://models/any", method="full", micro_batch=1, accumulation=8, ranks=8, gpus_per_node=8,
        zero_stage=stage, tensor_parallel=together,
    )  # fmt: skip
    return train, plan.make(train, folder, Packs.assumed(2048))


def test_what_ranks_hold_together_is_counted_once_for_all_of_them(tmp_path: Path) -> None:
    """Embedding, head and norms are whole on each; ZeRO shares out among the groups, not the ranks."""
    whole, cut = 2 * 32000 * 5120 + 81 * 5120, 40 * (4 * 5120**2 + 3 * 5120 * 13824)
    for together, stage in ((1, 2), (2, 1), (4, 2), (8, 1)):
        _, made = of_13b(tmp_path, together, stage)
        own, groups, kinds = whole + cut // together, 8 // together, made["bytes_per_rank"]
        assert made["parameters"] == whole + cut
        assert kinds["weights"] == 4 * own
        assert kinds["gradients"] == pytest.approx(4 * own / (groups if stage == 2 else 1))
        assert kinds["optimizer"] == pytest.approx(12 * own / groups)
        assert kinds["activations"] == pytest.approx(2 * 2048 * 40 * (10 + 24 / together) * 5120)
        assert kinds["save"] == pytest.approx(12 * (whole + cut) / 8), "which is written once, whoever holds it"


def test_preflight_takes_cards_that_have_room_for_their_part_of_each_matrix(tmp_path: Path) -> None:
    cards = Cards(gpus=(Gpu(name="H100", memory=80 * GIB, ecc_errors=0),) * 8)
    report = Report(host="a", rank=0, cards=cards, usable_gpus=8)
    for together, stage, fits in ((1, 1, False), (1, 2, True), (2, 1, True), (8, 1, True)):
        need = preflight.need_of(*of_13b(tmp_path, together, stage), tmp_path.as_uri())
        faults = [fault for check in judge([report], need) for fault in check.faults if check.name == "gpus"]
        assert ([fault for fault in faults if fault.what == "its memory"] == []) == fits


def test_a_model_that_cannot_be_cut_is_refused_by_its_plan(tmp_path: Path) -> None:
    GPT2Config(n_embd=64, n_layer=1, n_head=2).save_pretrained(tmp_path)
    train = Train(base="cache://models/x", method="full", zero_stage=1, tensor_parallel=2, ranks=2)
    with pytest.raises(BadInput, match="transformers has none for gpt2"):
        plan.make(train, tmp_path, Packs.assumed(128))


def test_ranks_of_a_group_count_once_in_what_a_step_is_dealt_out_to() -> None:
    train = Train(base="cache://models/x", method="full", zero_stage=1, tensor_parallel=2, ranks=2, accumulation=1)
    assert train.ranks == 2
    assert [tensor_parallel.share(rank, 4, 2) for rank in range(4)] == [(0, 2), (0, 2), (1, 2), (1, 2)]


@pytest.mark.parametrize(("config", "message"), [
    (GPT2Config(), "transformers has none for gpt2"),
    (LlamaConfig(num_key_value_heads=1), "num_key_value_heads is 1"),
    (LlamaConfig(intermediate_size=383), "intermediate_size is 383"),
])  # fmt: skip
def test_a_model_that_cannot_be_cut_evenly_is_refused(config: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        tensor_parallel.check(config, 2)
    tensor_parallel.check(LlamaConfig(), 2)
