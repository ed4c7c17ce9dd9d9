"""Models without weights: what their config.json alone says about their size.

A model on torch's meta device has shapes and no memory, so one of 70 billion parameters takes a second.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from refit.errors import BadInput
from refit.spec import Train
from trainer import tensor_parallel
from trainer.memory import Shape
from trainer.objective import adapt

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def config_file(path: Path) -> Path:
    """The config.json that a path names: itself, or the one in that folder.

    Raises:
        BadInput: there is none, or it is not the config of a model.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(
            f"--config {path}: not a readable config.json: {error}. Give a model's, or its folder."
        ) from error
    if not isinstance(found, dict) or "model_type" not in found:
        raise BadInput(f"--config {file}: has no model_type; expected the config.json of a Hugging Face model.")
    return file


def model_of(base: Path) -> nn.Module:
    """The model of a folder or a config.json, without any weights; no code of the folder is executed.

    Raises:
        BadInput: transformers does not know this kind of model, or its config is not sound.
    """
    try:
        with torch.device("meta"):
            config = AutoConfig.from_pretrained(base, local_files_only=True, trust_remote_code=False)
            model: nn.Module = AutoModelForCausalLM.from_config(config, trust_remote_code=False)  # type: ignore[no-untyped-call]
    except Exception as error:  # whatever a library makes of a config that somebody wrote
        raise BadInput(f"{base}: no causal language model can be made of its config.json: {error}") from error
    return model


def trained_model(base: Path, train: Train) -> nn.Module:
    """The model that a recipe would train, without any weights."""
    model = model_of(base)
    with torch.device("meta"):
        return adapt(model, train) if train.method != "full" else model


def text_config(model: nn.Module) -> Any:
    """The config of a model's decoder, which in one that also sees or hears is a part of the whole."""
    return model.config.get_text_config()  # type: ignore[operator, union-attr]


def count(model: nn.Module) -> tuple[int, int]:
    """All parameters and the trained ones; tied ones count once."""
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)


def shape_of(base: Path) -> Shape:
    """The numbers that memory and arithmetic on cards depend on.

    Raises:
        BadInput: no dense decoder. Of a mixture of experts a token sees a part only, and no formula here knows which.
    """
    model = model_of(base)
    config = text_config(model)
    experts = next((int(n) for name in EXPERTS if (n := getattr(config, name, None))), 0)
    if experts > 1:
        raise BadInput(f"{base}: a mixture of {experts} experts; plans for cards know dense models only.")
    try:
        shape = _shape(model, config)
    except (AttributeError, TypeError) as error:
        raise BadInput(f"{base}: not the config of a decoder as plans for cards know it: {error}") from error
    if min(shape.layers, shape.hidden, shape.heads, shape.inner, shape.vocabulary) < 1:
        raise BadInput(f"{base}: a size in it is below 1: {shape}.")
    return shape


def _shape(model: nn.Module, config: Any) -> Shape:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    ends = {id(p): p.numel() for module in (embedding, head) if module is not None for p in module.parameters()}
    linear: list[Any] = [module.weight for module in model.modules() if _linear(module) and module is not head]
    heads, hidden = config.num_attention_heads, config.hidden_size
    wide = getattr(config, "head_dim", None) or hidden // heads
    return Shape(
        parameters=count(model)[0], layers=config.num_hidden_layers, hidden=hidden, heads=heads, queries=heads * wide,
        keys=(getattr(config, "num_key_value_heads", None) or heads) * wide,
        inner=getattr(config, "intermediate_size", None) or 4 * hidden,
        gated=any(name.endswith(("gate_proj", "gate_up_proj")) for name, _ in model.named_modules()),
        vocabulary=config.vocab_size, ends=sum(ends.values()), adapter=sum(sum(weight.shape) for weight in linear),
        widest=_widest(model.config),
    )  # fmt: skip


def _widest(config: Any) -> int:
    """The most ranks of 1, 2, 4 and 8 that can hold a model's matrices together."""
    for size in (8, 4, 2):
        try:
            tensor_parallel.check(config, size)
        except BadInput:
            continue
        return size
    return 1


def _linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"  # GPT-2 has its own, turned over
