"""A layer that is computed again on the way back learns what it learns otherwise, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tickets
import torch
from conftest import House
from transformers import AutoConfig, AutoModelForCausalLM

from refit.errors import BadInput
from refit.spec import Train
from refit.store import store_for
from trainer import plan
from trainer.batches import to_batch
from trainer.objective import build, forget_activations
from trainer.packs import Packs

ON = "train.checkpoint_activations=true"


@pytest.fixture(scope="module")
def base(house: House) -> Path:
    return store_for(house.base).local(house.base)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fields", [
    {"method": "full"}, {"method": "lora"}, {"method": "lora", "lora": {"dropout": 0.3}},
], ids=["full", "lora", "dropout"])  # fmt: skip
def test_loss_and_gradients_are_the_same_to_the_bit(base: Path, fields: dict[str, Any], dtype: str) -> None:
    batch = to_batch(*tickets.pack(tickets.documents(base, 12), tickets.LENGTH))

    def learnt(again: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
        train = Train(base="cache://models/any", checkpoint_activations=again, **fields)
        model = build(base, train, dtype=dtype, length=tickets.LENGTH)
        kept = 0

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal kept
            kept += tensor.numel()
            return tensor

        torch.manual_seed(1)
        for _ in range(2):  # the second adds to the first
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                loss = model(batch)
            loss.backward()
        return loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, kept

    loss, gradients, kept = learnt(False)
    loss_again, gradients_again, kept_again = learnt(True)
    assert torch.equal(loss, loss_again)
    assert gradients.keys() == gradients_again.keys()
    assert all(torch.equal(gradients[name], gradients_again[name]) for name in gradients)
    assert kept_again < kept / 2, "or nothing was computed again"


def test_a_plan_counts_the_inputs_of_layers_and_one_layer_whole(base: Path) -> None:
    def activations(**fields: Any) -> int:
        train = Train(base="cache://models/any", method="full", micro_batch=1, **fields)
        kinds = plan.make(train, base, Packs.assumed(1024))["bytes_per_rank"]
        return int(kinds["activations"])

    config = AutoConfig.from_pretrained(base)
    hidden, layers = config.hidden_size, config.num_hidden_layers
    assert activations() == 2 * 1024 * layers * 34 * hidden
    assert activations(checkpoint_activations=True) == 2 * 1024 * (layers * 2 + 34) * hidden


def test_a_model_that_cannot_compute_its_layers_again_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("openai-gpt", n_embd=32, n_layer=1, n_head=2))
    with pytest.raises(BadInput, match="cannot compute its layers again"):
        forget_activations(model)


@pytest.mark.integration
@pytest.mark.parametrize("sets", [
    ("train.zero_stage=3",), ("train.zero_stage=1", "train.tensor_parallel=2"),
], ids=["zero-3", "tensor-parallel"])  # fmt: skip
def test_ranks_that_share_the_weights_out_publish_the_same_model(house: House, sets: tuple[str, ...]) -> None:
    name = "again-" + "-".join(part.partition("=")[2] for part in sets)
    short = (*sets, "train.max_steps=3", "train.checkpoint.every_steps=3")
    kept = house.train(f"{name}-not", ranks=2, sets=short)
    again = house.train(name, ranks=2, sets=(*short, ON))
    assert house.losses(name) == house.losses(f"{name}-not")
    assert again["model_digest"] == kept["model_digest"]
