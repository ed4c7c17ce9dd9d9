"""From an engine to a folder that can be served: merged weights, tokenizer, template, generation config.

What is published is read back and asked: its logits must be those of the model in training, up to the rounding of the
type it is stored in.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed, nn

from refit.errors import Infrastructure
from refit.manifest import MANIFEST
from trainer import device
from trainer.batches import Batch, Loader
from trainer.card import CARD
from trainer.engines import Engine
from trainer.objective import Objective, attention_for, load
from trainer.order import packs_of_step
from trainer.publishing import ADAPTER, MODEL
from trainer.task import Task

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Root mean square of the logits' difference over their standard deviation, by the coarser type of the two."""


def export(engine: Engine, task: Task, loader: Loader) -> dict[str, Any]:
    """Write model (and adapter) below `task.export`; all ranks together, rank 0 writes.

    Raises:
        Infrastructure: what was written does not answer like what was trained.
    """
    batch = loader.batch(_shown(task, loader))
    trained = engine.logits(device.put(batch)).cpu()
    rank = distributed.get_rank()
    if rank == 0:
        shutil.rmtree(task.export, ignore_errors=True)
        task.export.mkdir(parents=True)
    with engine.whole() as objective:
        weights = _weights(objective.model, task) if rank == 0 else {}
    if rank != 0:
        return {}
    folder = task.export / MODEL
    dtype = stored_dtype(task.base)
    _save(weights, task, folder, dtype)
    if task.train.method == "qlora":  # it was trained on a coarser base than it is merged into
        trained = unmerged(task.base, task.export / ADAPTER, batch, loader.length)
    difference = _difference(trained, folder, batch, loader.length)
    coarser = torch.bfloat16 if task.dtype == "bfloat16" else dtype
    if not difference <= TOLERANCE[coarser]:  # nor where it is no number
        raise Infrastructure(
            f"the exported model's logits differ from the trained one's by {difference:.2g} of their spread; at most "
            f"{TOLERANCE[coarser]:g} is rounding. Nothing was published."
        )
    return {"export_difference": difference}


def _shown(task: Task, loader: Loader) -> NDArray[np.int64]:
    """The pack on which both models are compared: the first that is learnt from. One pack has hundreds of targets, and
    the proof is computed on the processor."""
    order = (packs_of_step(at, per_step=1, packs=loader.packs, seed=task.train.seed) for at in range(loader.packs))
    return next(pack for pack in order if loader.split.mask[pack][:, 1:].any())


def stored_dtype(base: Path) -> torch.dtype:
    """The type that a model folder keeps its weights in."""
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    return DTYPES[config.get("dtype") or config.get("torch_dtype") or "float32"]


def _weights(model: nn.Module, task: Task) -> dict[str, Tensor]:
    """Copies of all weights in the host's memory; for LoRA of the adapter's, which are written as a folder too."""
    if task.train.method == "full":
        return {name: value.detach().to("cpu", copy=True) for name, value in model.state_dict().items()}
    from peft import get_peft_model_state_dict

    state = {name: value.detach().to("cpu", copy=True) for name, value in get_peft_model_state_dict(model).items()}
    # A path of this machine would be wrong everywhere else, and would make equal adapters differ.
    model.peft_config["default"].base_model_name_or_path = task.train.base  # type: ignore[index,union-attr]
    model.save_pretrained(task.export / ADAPTER, state_dict=state)  # type: ignore[operator]
    (task.export / ADAPTER / CARD).unlink(missing_ok=True)
    return state


def _save(weights: dict[str, Tensor], task: Task, folder: Path, dtype: torch.dtype) -> None:
    # A fresh base in float32 is what the adapter is merged into: merging in bfloat16 would round twice.
    model = load(task.base, dtype=torch.float32, attention="eager")
    if task.train.method != "full":
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, task.export / ADAPTER).merge_and_unload()
    else:
        model.load_state_dict(weights)
    model.to(dtype).save_pretrained(folder)  # type: ignore[operator]
    for file in folder.iterdir():
        file.chmod(0o644)
    # The rest is the base's own, byte for byte: nothing there has been learnt, and equal models stay equal. Its card is
    # about itself, and in no manifest where we laid it.
    for file in task.base.iterdir():
        if file.is_file() and not file.name.endswith((".safetensors", ".index.json", MANIFEST, CARD)):
            shutil.copyfile(file, folder / file.name)


def unmerged(base: Path, adapter: Path, batch: Batch, length: int) -> Tensor:
    """What an adapter answers at a batch's targets, laid over the whole base in float32."""
    from peft import PeftModel

    model = PeftModel.from_pretrained(load(base, dtype=torch.float32, attention=attention_for(length)), adapter)
    with torch.no_grad():
        return Objective(model.eval(), bfloat16=False).logits(batch)


def _difference(trained: Tensor, folder: Path, batch: Batch, length: int) -> float:
    exported = Objective(load(folder, dtype=torch.float32, attention=attention_for(length)).eval(), bfloat16=False)
    with torch.no_grad():
        answer = exported.logits(batch)
    return float((answer - trained).pow(2).mean().sqrt() / trained.std())
