"""The optimizer of every engine, and clipping."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from refit.spec import Train
from trainer.objective import Objective


def adamw(objective: Objective, train: Train) -> torch.optim.AdamW:
    """Adam over what learns."""
    return torch.optim.AdamW(
        _groups(objective, train.weight_decay), lr=train.learning_rate, betas=(train.beta1, train.beta2), fused=True
    )


def trained(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that learn."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def clip(parameters: list[nn.Parameter], most: float) -> float:
    """Clip the gradients of parameters that are whole here to a norm of `most`; returns their norm before.

    In two halves: clipping by what is not finite would make every gradient so, and hide where it began. Then nothing
    is clipped.
    """
    total = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    norm = float(total)
    if math.isfinite(norm):
        nn.utils.clip_grads_with_norm_(parameters, most, total)
    return norm


def _groups(objective: Objective, weight_decay: float) -> list[dict[str, Any]]:
    learning = trained(objective)
    if weight_decay == 0:
        return [{"params": learning, "weight_decay": 0.0}]
    # Norms and biases are scales and offsets; pulling them to 0 is not regularisation.
    matrices = [parameter for parameter in learning if parameter.ndim > 1]
    rest = [parameter for parameter in learning if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
