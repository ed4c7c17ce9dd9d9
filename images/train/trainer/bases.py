"""Base models: folders in Hugging Face's layout, committed with a manifest like everything else.

Only what is data comes in (weights as safetensors, JSON, text). A pickle is code that runs when it is read: refused.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from refit.errors import BadInput
from refit.fingerprint import digest
from refit.manifest import Manifest, describe
from refit.store import store_for

NAMES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model",
    "model.safetensors.index.json",
)  # fmt: skip
NEEDED = ("config.json", "tokenizer.json", "tokenizer_config.json")


def import_folder(folder: Path, uri: str) -> dict[str, Any]:
    """Commit a Hugging Face folder as a base model.

    Raises:
        BadInput: the folder lacks what a base model needs, or has its weights only as pickles.
    """
    missing = [name for name in NEEDED if not (folder / name).is_file()]
    if missing:
        raise BadInput(f"{folder}: no {', '.join(missing)} there; expected a model folder in Hugging Face's layout.")
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise BadInput(f"{folder}: no *.safetensors there. Pickled weights are not read; convert them first.")

    def write(target: Path) -> None:
        for path in [*weights, *(folder / name for name in NAMES)]:
            if path.is_file():
                shutil.copyfile(path, target / path.name)

    return publish(uri, write)


def publish(uri: str, write: Callable[[Path], None]) -> dict[str, Any]:
    """Commit what `write` puts into a folder as the base model at `uri`; one that is there already must be the same.

    Raises:
        BadInput: another model is at `uri`.
    """
    store = store_for(uri)
    with store.publish(uri) as draft:
        write(draft.path)
        for path in draft.path.iterdir():
            path.chmod(0o644)  # servers may run as somebody else
        files = describe(draft.path)
        facts = facts_of(draft.path)
        made = Manifest(kind="model", fingerprint=digest([(f.path, f.sha256) for f in files])[:32], facts=facts)
        manifest = draft.commit(made)
    if manifest.fingerprint != made.fingerprint:
        raise BadInput(f"{uri}: another model is there. Remove the folder, or choose another address.")
    return {"model": uri, "model_digest": manifest.content_digest(), **manifest.facts}


def facts_of(folder: Path) -> dict[str, Any]:
    """What a person wants to know of a model folder: its architecture, size and type, the tokens that its tokenizer
    has, and the rows of its embedding."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    headers = [safetensors_header(path) for path in sorted(folder.glob("*.safetensors"))]
    tensors = [tensor for header in headers for name, tensor in header.items() if name != "__metadata__"]
    return {
        "architecture": (config.get("architectures") or [config.get("model_type")])[0],
        "parameters": sum(_product(tensor["shape"]) for tensor in tensors),
        "dtypes": sorted({tensor["dtype"] for tensor in tensors}),
        "tokens": _tokens(folder / "tokenizer.json"),
        "rows": config.get("vocab_size") or config.get("text_config", {}).get("vocab_size"),
    }


def _tokens(tokenizer: Path) -> int:
    """One more than the highest id that a tokenizer gives."""
    try:
        read = Tokenizer.from_file(str(tokenizer))
    except Exception as error:  # the library raises no narrower one
        raise BadInput(f"{tokenizer.name}: cannot be read as a tokenizer: {error}") from error
    return 1 + max(read.get_vocab(with_added_tokens=True).values())


def safetensors_header(path: Path) -> dict[str, Any]:
    """Names, types and shapes of a safetensors file; its weights are not read.

    Source: https://github.com/huggingface/safetensors#format
    """
    with path.open("rb") as handle:
        size = int.from_bytes(handle.read(8), "little")
        if not 0 < size <= 100 << 20:
            raise BadInput(f"{path}: not a safetensors file.")
        header: dict[str, Any] = json.loads(handle.read(size))
    return header


def _product(shape: list[int]) -> int:
    product = 1
    for length in shape:
        product *= length
    return product
