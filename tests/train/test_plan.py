"""`trainer plan` as a person calls it: for this machine, for a model that is only a config, and for cards."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import House
from transformers import AutoModelForCausalLM, LlamaConfig

from refit.errors import BadInput
from refit.spec import Train
from refit.spec.training import Lora
from trainer import cli
from trainer.memory import Layout, activations_per_token, least, usable
from trainer.objective import adapt, forget_activations
from trainer.shapes import config_file, shape_of, trained_model

LLAMA_7B = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
            "num_attention_heads": 32, "vocab_size": 32000, "tie_word_embeddings": False}  # fmt: skip
LLAMA_13B = {**LLAMA_7B, "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40,
             "num_attention_heads": 40}  # fmt: skip
QWEN_05B = {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
            "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
            "tie_word_embeddings": True}  # fmt: skip

SPEC = """
name: tickets
title: Tickets
team: support
owner: support@example.com
data: {sources: [{name: mail, uri: "file:///nowhere/mail.jsonl"}], pack_length: 2048}
train: {base: "file:///nowhere/model", max_steps: 1000}
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "tickets.yaml"
    path.write_text(SPEC, encoding="utf-8")
    return path


def config(folder: Path, document: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def plan(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, dict[str, Any], str]:
    code = cli.main(["plan", *map(str, argv)])
    said = capsys.readouterr()
    return code, json.loads(said.out.splitlines()[-1]), said.err


@pytest.mark.parametrize(
    ("document", "parameters"), [(LLAMA_7B, 6_738_415_616), (LLAMA_13B, 13_015_864_320), (QWEN_05B, 494_032_768)]
)
def test_a_config_alone_says_how_large_a_model_is(tmp_path: Path, document: dict[str, Any], parameters: int) -> None:
    file = config(tmp_path, document)
    shape = shape_of(config_file(tmp_path))
    assert shape.parameters == parameters
    adapted = trained_model(file, Train(base="file:///nowhere", method="lora"))
    learn = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert shape.adapter * 16 == learn, "as peft makes it"


@pytest.mark.parametrize(("inner", "keys", "layers"), [(688, 4, 4), (1024, 2, 6)])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_activations_are_what_autograd_keeps(
    tmp_path: Path, method: Any, checkpointing: bool, inner: int, keys: int, layers: int
) -> None:
    """The formula against the tensors that a forward pass of this trainer's saves, each storage once."""
    document = LlamaConfig(
        hidden_size=256, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=keys, vocab_size=512,
    )  # fmt: skip
    kind = torch.float32 if method == "full" else torch.bfloat16
    model = AutoModelForCausalLM.from_config(document, dtype=kind, attn_implementation="sdpa")
    if method == "lora":
        model = adapt(model, Train(base="cache://models/any", lora=Lora(rank=1))).base_model.model
    if checkpointing:
        forget_activations(model)
    model.train()
    weights = {storage for p in model.parameters() for storage in (p.shape, p.shape[::-1])}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own and tensor.shape not in weights:  # nor a copy of a weight
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        out = model.model(input_ids=torch.zeros(1, 384, dtype=torch.long), use_cache=False)
    assert out.last_hidden_state.requires_grad
    document.save_pretrained(tmp_path)
    shape, layout = shape_of(tmp_path), Layout(method=method, lora_rank=1, ranks=1, checkpointing=checkpointing)
    expected = activations_per_token(shape, layout)
    if checkpointing:  # the layer that is whole on the way back is not there yet; the last norm is
        expected -= activations_per_token(replace(shape, layers=0), layout)
        expected += (8 if method == "full" else 4) * shape.hidden
    held = sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) / 384
    assert held == pytest.approx(expected, rel=0.03)


def test_cards_get_a_recipe_with_everything_that_a_plan_says(
    tmp_path: Path, spec: Path, house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    code, here, _ = plan(capsys, house.spec, "--data", house.data)
    assert code == 0
    file = config(tmp_path, LLAMA_7B)
    code, there, said = plan(capsys, spec, "--config", file, "--gpus", 8, "--gpu-price", 2, "--method", "full")
    assert code == 0
    assert set(here) - set(there) == set()
    assert (there["fits"], there["zero_stage"], there["parameters"]) == (True, 2, 6_738_415_616)
    assert set(there["bytes_per_rank"]) >= set(here["bytes_per_rank"]) - {"save"}, "a card holds no copy for a save"
    assert here["bytes_per_rank"]["save"] == here["checkpoint_bytes"]
    for word in ("zero stage", "memory: optimizer", "hours", "MFU of 40%", "cost", "checkpoint minutes", "it fits"):
        assert word in said
    code, of_data, _ = plan(capsys, house.spec, "--data", house.data, "--gpus", 1)
    assert (of_data["epochs"], of_data["tokens"]) == (here["epochs"], here["tokens"])


@pytest.mark.parametrize(("document", "memory", "chosen"), [
    (LLAMA_7B, "80GiB", (2, 1)), (LLAMA_13B, "80GiB", (3, 1)), (LLAMA_13B, "139GiB", (2, 2)),
])  # fmt: skip
def test_what_is_said_to_fit_has_room_by_what_this_trainer_takes(
    tmp_path: Path, spec: Path, capsys: pytest.CaptureFixture[str], document: dict[str, Any], memory: str, chosen: Any
) -> None:
    """The chosen recipe, planned as preflight has it planned: the same weights, gradients and optimizer, and room."""
    file = config(tmp_path, document)
    _, there, said = plan(
        capsys, spec, "--config", file, "--gpus", 8, "--gpu-memory", memory, "--method", "full"
    )  # fmt: skip
    assert "it fits" in said
    assert "no room for it" not in said
    sets = [part for text in there["sets"] for part in ("--set", text)]
    _, here, _ = plan(capsys, spec, "--config", file, *sets)
    train = Train.model_validate({"base": "cache://models/any", **{
        name: here[name] for name in ("method", "zero_stage", "micro_batch", "accumulation", "ranks")
    }, "gpus_per_node": 8, "tensor_parallel": there["tensor_parallel"]})  # fmt: skip
    assert (train.zero_stage, train.tensor_parallel) == chosen
    kinds, counted = here["bytes_per_rank"], there["bytes_per_rank"]
    assert least(train, kinds) <= usable(int(memory.removesuffix("GiB")) << 30)
    for kind in ("weights", "gradients", "optimizer"):
        assert kinds[kind] == pytest.approx(counted[kind], rel=1e-3)


def test_a_config_plans_for_this_machine_as_a_base_model_does(house: House, capsys: pytest.CaptureFixture[str]) -> None:
    from refit.store import store_for

    _, whole, _ = plan(capsys, house.spec)
    folder = store_for(house.base).local(house.base)
    _, alone, said = plan(capsys, house.spec, "--config", folder, "--set", "train.base=file:///nowhere")
    measured = {"seconds", "hours", "bytes_available", "why"}
    assert {k: v for k, v in whole.items() if k not in measured} == {
        k: v for k, v in alone.items() if k not in measured
    }
    assert alone["zero_stage"] == 0
    assert "memory: all ranks" in said


def test_a_13b_on_one_card_says_what_would_fit(tmp_path: Path, spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, made, said = plan(
        capsys, spec, "--config", config(tmp_path, LLAMA_13B), "--gpus", 1, "--gpu-memory", "80GB", "--method", "full"
    )
    assert (code, made["fits"]) == (0, False)
    assert "this does not fit, because" in said
    assert "what would: 6 cards like these, at ZeRO stage 3; LoRA" in said


@pytest.mark.parametrize(
    ("document", "wrong"),
    [
        ({}, "no model_type"),
        ({"model_type": "t5"}, "no causal language model"),
        ({"model_type": "never-heard-of"}, "no causal language model"),
        ({"model_type": "llama", "num_hidden_layers": 0}, "below 1"),
        ({"model_type": "mixtral", "num_hidden_layers": 1}, "8 experts"),
    ],
)
def test_a_config_that_is_no_dense_decoder_is_refused(tmp_path: Path, document: dict[str, Any], wrong: str) -> None:
    with pytest.raises(BadInput, match=wrong):
        shape_of(config_file(config(tmp_path, document)))


def test_what_makes_no_sense_is_refused(tmp_path: Path, spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = config(tmp_path, QWEN_05B)
    for argv, wrong in (
        (("--gpus", "0"), "--gpus 0"),
        (("--mfu", "0.5"), "--mfu: describes cards"),
        (("--gpus", "1", "--output", tmp_path / "out"), "--output"),
        (("--gpus", "1", "--ranks", "2"), "--ranks"),
    ):
        code, answer, _ = plan(capsys, spec, "--config", file, *argv)
        assert (code, answer["error"]) == (10, "BadInput")
        assert answer["message"].startswith(wrong)
    code, answer, _ = plan(capsys, spec, "--config", tmp_path / "nothing", "--gpus", 1)
    assert (code, answer["message"].startswith("--config")) == (10, True)
