"""Any causal model: what it learns of a document does not depend on what lies beside it in the pack.

Models that ignore positions, or carry a state along the pack, read across documents and say nothing of it.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import House
from transformers import AutoConfig, AutoModelForCausalLM

from refit.errors import BadInput
from refit.spec import Train
from refit.store import store_for
from trainer import apart, plan
from trainer.bases import import_folder
from trainer.batches import Batch, to_batch
from trainer.objective import Objective
from trainer.packs import Packs

SMALL = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "num_experts_per_tok": 2}
OLD = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
APART: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen3": {"head_dim": 16}, "mistral": {"sliding_window": 16}, "phi3": {}, "gpt_neox": {},
    "gemma3_text": {"sliding_window": 16, "head_dim": 16}, "qwen3_moe": {"num_experts": 4, **EXPERTS},
    "mixtral": {"num_local_experts": 4}, "gpt2": {**OLD, "attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0},
}  # fmt: skip
ACROSS: dict[str, dict[str, Any]] = {
    "falcon": {"alibi": False}, "bloom": {"n_head": 4, "n_layer": 2}, "mamba": {"state_size": 8},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64, "dropout": 0.0}, "gpt_oss": {"num_local_experts": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_next": {
        "num_experts": 4, **EXPERTS, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "head_dim": 16,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"],
    },
}  # fmt: skip
SIZES = (30, 2, 25, 40, 1, 11)


def model_of(name: str, **more: Any) -> torch.nn.Module:
    """A small model of an architecture, whose weights are large enough for every path to matter."""
    config = AutoConfig.for_model(name, **{**SMALL, **(APART | ACROSS)[name], **more})
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def documents() -> list[np.ndarray]:
    draw = np.random.default_rng(3)
    return [draw.integers(1, 300, size) for size in SIZES]


def pack(found: list[np.ndarray], length: int) -> Batch:
    """All in one pack; the first document's own first half is not learnt."""
    tokens, segments, mask = (np.zeros((1, length), np.int64) for _ in range(3))
    place = 0
    for number, ids in enumerate(found, start=1):
        end = place + len(ids)
        tokens[0, place:end], segments[0, place:end] = ids, number
        mask[0, place + 1 : end] = 255
        place = end
    return to_batch(tokens, segments, mask)


@pytest.mark.parametrize("name", [*APART, *ACROSS])
def test_a_document_has_the_loss_and_the_gradient_in_a_pack_that_it_has_alone(name: str) -> None:
    objective = Objective(model_of(name).eval(), bfloat16=False)

    def learnt(batches: list[Batch]) -> tuple[float, torch.Tensor]:
        objective.zero_grad()
        total = 0.0
        for batch in batches:
            loss = objective(batch)
            loss.backward()
            total += float(loss.detach())
        return total, torch.cat([p.grad.flatten() for p in objective.parameters() if p.grad is not None])

    packed, gradient = learnt([pack(documents(), 128)])
    alone, expected = learnt([pack([document], len(document)) for document in documents() if len(document) > 1])
    assert packed == pytest.approx(alone, rel=1e-6)
    assert float((gradient - expected).norm() / expected.norm()) < 1e-5


def test_a_model_is_asked_whether_it_reads_across_documents() -> None:
    seen = {}
    for name in ("llama", "falcon", "mamba"):
        model = model_of(name).eval()

        def ask(tokens: torch.Tensor, positions: torch.Tensor, model: Any = model) -> torch.Tensor:
            logits: torch.Tensor = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
            return logits

        seen[name] = apart.sees_apart(ask, 300, torch.device("cpu"), coarse=False)
    assert seen == {"llama": True, "falcon": False, "mamba": False}


def config_of(name: str) -> Any:
    """A small config with the fields of its own kind alone: Mamba's and RWKV's know no heads."""
    own = AutoConfig.for_model(name)
    fields = {**SMALL, **(APART | ACROSS).get(name, {})}
    return AutoConfig.for_model(name, **{field: value for field, value in fields.items() if hasattr(own, field)})


@pytest.mark.parametrize("name", [*APART, *ACROSS, "rwkv"])
def test_whatever_trains_can_be_planned(tmp_path: Path, name: str) -> None:
    """Scores count where there are heads to have them."""
    config = config_of(name)
    config.save_pretrained(tmp_path)
    train = Train(base="cache://models/any", method="full", micro_batch=1)
    made = plan.make(train, tmp_path, Packs.assumed(128))
    scores = 5 * 128 * getattr(config, "num_attention_heads", 0)
    assert made["bytes_per_rank"]["activations"] == 2 * 128 * 2 * (34 * 64 + scores)
    assert (scores == 0) == (name in ("mamba", "rwkv"))


def test_a_model_that_also_sees_is_planned_by_its_decoder(tmp_path: Path) -> None:
    inner = {**SMALL, "head_dim": 16}
    seen = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    AutoConfig.for_model("gemma3", text_config=inner, vision_config=seen).save_pretrained(tmp_path)
    made = plan.make(Train(base="cache://models/any", method="full"), tmp_path, Packs.assumed(1024))
    assert made["bytes_per_rank"]["activations"] == 2 * 4 * 1024 * 2 * 34 * 64


def test_a_model_that_takes_no_adapters_is_refused_by_its_plan(tmp_path: Path) -> None:
    config_of("mamba").save_pretrained(tmp_path)
    with pytest.raises(BadInput, match="no adapters can be laid on MambaForCausalLM"):
        plan.make(Train(base="cache://models/any", method="lora"), tmp_path, Packs.assumed(128))


@pytest.mark.parametrize("places", [None, 1, 60, 256])
def test_rows_hold_each_document_with_a_target_once_and_in_order(places: int | None) -> None:
    batch = pack(documents(), 128)
    runs = list(apart.rows(batch, places))
    rows = [row for tokens, _, _ in runs for row in tokens.tolist()]
    long = [document.tolist() for document in documents() if len(document) > 1]
    assert [row[: len(ids)] for row, ids in zip(rows, long, strict=True)] == long
    targets = [
        tokens[at, place + 1].item()
        for tokens, _, select in runs
        for at, place in torch.nonzero(select).tolist()
    ]  # fmt: skip
    assert targets == batch.labels.tolist()
    if places is None:
        assert len(runs) == 1
    else:
        assert all(tokens.numel() <= places or len(tokens) == 1 for tokens, _, _ in runs)


@pytest.mark.integration
def test_ranks_that_share_the_weights_of_a_model_that_reads_across_learn_what_one_learns(house: House) -> None:
    """Whatever their documents: who asked for a weight more often than the others would wait for them for ever."""
    base = store_for(house.base).local(house.base)
    folder = house.root / "falcon"
    model_of("falcon", vocab_size=1024).save_pretrained(folder)
    for file in base.glob("*token*"):
        if file.suffix == ".json":
            shutil.copyfile(file, folder / file.name)
    uri = house.uri("falcon-base")
    import_folder(folder, uri)
    sets = (f"train.base={uri}", "train.max_steps=4", "train.checkpoint.every_steps=4")
    shared = house.train("falcon-3", ranks=2, sets=(*sets, "train.zero_stage=3"))
    alone = house.train("falcon-alone", sets=sets)
    for mine, theirs in zip(house.losses("falcon-3"), house.losses("falcon-alone"), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)
    assert (shared["steps"], alone["steps"]) == (4, 4), "and what was published answered like what was trained"
