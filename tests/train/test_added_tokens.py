"""Tokens that somebody added to a base model: learnt, published and loaded again, or refused where they have no row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tickets
import torch
from conftest import House
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from refit.store import store_for
from trainer.bases import import_folder
from trainer.objective import load

ADDED = ["<|tool|>", "<|refund|>", "<|parcel|>"]
SETS = ("train.max_steps=4", "train.checkpoint.every_steps=4", "train.learning_rate=0.01", "train.warmup_steps=0")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def extended(house: House, folder: Path, *, rows: int | None, tied: bool = True) -> str:
    """The base with tokens added to its tokenizer, and its embeddings resized to `rows` (None: as they were)."""
    base = store_for(house.base).local(house.base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    assert tokenizer.add_special_tokens({"additional_special_tokens": ADDED}) == len(ADDED)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if not tied:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    if rows is not None:
        torch.manual_seed(5)
        model.resize_token_embeddings(rows, mean_resizing=False)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    uri = folder.with_name(f"{folder.name}-committed").as_uri()
    import_folder(folder, uri)
    return uri


def house_of(house: House, base: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> House:
    """The house with that base, and a dataset whose tickets begin with an added token each."""
    plain = tickets.tickets
    said = {intent: ADDED[at] for at, intent in enumerate(sorted(tickets.INTENTS))}

    def marked(count: int, seed: int = 1) -> list[tuple[str, str]]:
        return [(said[json.loads(answer)["intent"]] + text, answer) for text, answer in plain(count, seed)]

    monkeypatch.setattr(tickets, "tickets", marked)
    data = tickets.dataset((root / "data").as_uri(), store_for(base).local(base), count=120)
    spec = root / "spec.yaml"
    spec.write_text(house.spec.read_text().replace(house.base, base), encoding="utf-8")
    return House(root, spec, base, data)


def size_of(house: House) -> int:
    return len(AutoTokenizer.from_pretrained(store_for(house.base).local(house.base)))


def published(answer: dict[str, Any], which: str = "model") -> Path:
    return store_for(answer[which]).local(answer[which])


@pytest.mark.integration
@pytest.mark.parametrize("tied", [True, False])
def test_added_tokens_are_learnt_and_the_model_has_them_where_it_is_loaded_again(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    """The rows are more than the tokens, as where embeddings are padded to a multiple."""
    size = size_of(house) + len(ADDED)
    rows = -(-size // 64) * 64
    assert rows > size
    base = extended(house, tmp_path / "model", rows=rows, tied=tied)
    answer = house_of(house, base, tmp_path, monkeypatch).train("full", sets=SETS)
    model, before = published(answer), load_file(store_for(base).local(base) / "model.safetensors")
    weights = load_file(model / "model.safetensors")
    assert (HEAD in weights) == (not tied), "a tied head is there once"
    assert json.loads((model / "config.json").read_text())["vocab_size"] == rows == len(weights[EMBEDDING])
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer.convert_tokens_to_ids(ADDED)
    assert tokenizer("".join(ADDED), add_special_tokens=False)["input_ids"] == ids
    assert (weights[EMBEDDING][ids] != before[EMBEDDING][ids]).any(dim=1).all(), "all three were read, and learnt"
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied


@pytest.mark.integration
def test_an_adapter_over_added_tokens_loads_over_its_base_and_answers_like_the_merged_model(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = extended(house, tmp_path / "model", rows=size_of(house) + len(ADDED))
    answer = house_of(house, base, tmp_path, monkeypatch).train("lora", sets=(*SETS, "train.method=lora"))
    merged = published(answer)
    ids = AutoTokenizer.from_pretrained(merged)("<|refund|>refund 1234", return_tensors="pt")["input_ids"]
    over = PeftModel.from_pretrained(
        load(store_for(base).local(base), dtype=torch.float32, attention="eager"), published(answer, "adapter")
    ).eval()
    whole = load(merged, dtype=torch.float32, attention="eager").eval()
    with torch.no_grad():
        assert torch.allclose(over(input_ids=ids).logits, whole(input_ids=ids).logits, atol=1e-4)


def test_tokens_without_a_row_in_the_embedding_are_refused_before_a_rank_starts(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = extended(house, tmp_path / "model", rows=None)
    code, answer, said = house_of(house, base, tmp_path, monkeypatch).run(
        "run", "--output", (tmp_path / "out").as_uri(), sets=SETS
    )
    assert (code, answer["error"]) == (10, "BadInput"), said
    assert "tokens were added to the tokenizer alone" in answer["message"]
    assert not (tmp_path / "out" / "ranks").exists()
