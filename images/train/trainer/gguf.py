"""A GGUF file as a base model: weights taken out of their quantization, the tokenizer rebuilt, both written plainly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from refit.errors import BadInput
from trainer.bases import publish


def import_gguf(file: Path, uri: str) -> dict[str, Any]:
    """Commit a GGUF file as a base model in bfloat16 (finer than what four bits held).

    Raises:
        BadInput: it is not a GGUF file, or it has no chat template.
    """
    with file.open("rb") as handle:
        if handle.read(4) != b"GGUF":
            raise BadInput(f"{file}: not a GGUF file.")

    def write(target: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        if not tokenizer.chat_template:
            raise BadInput(f"{file}: the tokenizer inside has no chat template.")
        _model(file).save_pretrained(target)
        tokenizer.save_pretrained(target)
        _tidy(target)

    return publish(uri, write)


def _model(file: Path) -> Any:
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = read.config
    # A fresh model from config and weights: what was read still calls itself quantized, and will not be saved.
    del config.quantization_config
    # GGUF keeps this as a float32; the number that was meant is its shortest form.
    config.rms_norm_eps = float(f"{config.rms_norm_eps:.7g}")
    config.dtype = torch.bfloat16
    for name in ("_model_name_or_path", "name_or_path"):
        config.__dict__.pop(name, None)
    model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.to(torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    return model


def _tidy(target: Path) -> None:
    """Leave out what tells where and how it was read: equal models should be equal files."""
    path = target / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    for name in ("is_local", "local_files_only", "name_or_path"):
        config.pop(name, None)
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
