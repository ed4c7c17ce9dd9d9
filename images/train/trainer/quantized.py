"""QLoRA's base: weights in 4 bits on a card, by bitsandbytes (Dettmers et al. 2023).

NF4 with doubly quantized constants, multiplied in bfloat16, as the paper does; adapters are those of LoRA. The adapter
is merged into the base as it was before it was quantized, so what is published is not the very model in training: its
proof is that it answers like the adapter on that base. No card has run this yet.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from torch import nn

from refit.errors import PreflightRefused
from refit.spec import Train

LIBRARY = "bitsandbytes"


def check(train: Train) -> None:
    """Refuse a machine that cannot hold weights in 4 bits.

    Raises:
        PreflightRefused: it has no card, is to use none, or lacks bitsandbytes.
    """
    if train.gpus_per_node == 0:
        why = "train.gpus_per_node is 0, and weights in 4 bits need a card; give it one"
    elif not torch.cuda.is_available():
        why = "torch finds no card here, and weights in 4 bits need one; use a machine and an image with one"
    elif importlib.util.find_spec(LIBRARY) is None:
        why = f"{LIBRARY} is not installed here; use an image that has it"
    else:
        return
    raise PreflightRefused(f"train.method is qlora: {why}, or set train.method to lora.")


def load(base: Path, *, attention: str) -> nn.Module:
    """A causal model with its linear layers but the head in 4 bits, on this rank's card, made ready to be adapted."""
    from peft import prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantization = BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.bfloat16, attn_implementation=attention, local_files_only=True, use_safetensors=True,
        quantization_config=quantization, device_map={"": torch.cuda.current_device()},
    )  # fmt: skip
    ready: nn.Module = prepare_model_for_kbit_training(  # type: ignore[no-untyped-call]
        model, use_gradient_checkpointing=False
    )
    return ready
