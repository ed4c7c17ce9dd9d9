"""Tensor parallelism: several ranks hold a part of each matrix and compute a layer together (DeepSpeed's AutoTP).

Ranks beside each other make a group and see the same packs: with `size` 2, ranks 0 and 1 are the first group, 2 and 3
the second. DeepSpeed cuts the linear layers that the model's own plan in transformers names; embedding, head and norms
are whole on every rank. What is here says what may be cut, and where each shard lies in its parameter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn

from refit.errors import BadInput
from trainer.fragments import Window

STYLES = frozenset({"colwise", "rowwise", "replicated_with_grad_allreduce", "embedding_rowwise"})
"""What DeepSpeed 0.19 can do of transformers' plans, as far as it leaves a layer's answer as it was."""

DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def share(rank: int, ranks: int, size: int) -> tuple[int, int]:
    """Which share of a step's micro batches is a rank's, and of how many: a group of `size` ranks has one."""
    return rank // size, ranks // size


def check(config: Any, size: int) -> None:
    """Refuse a model that cannot be cut so.

    Raises:
        BadInput: transformers has no plan for it, or one with a style that DeepSpeed lacks, or heads or inner layer are
            no multiple of the ranks.
    """
    plan: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    unknown = sorted({style for style in plan.values() if style not in STYLES})
    if not plan or unknown:
        what = f"one with {', '.join(unknown)}" if unknown else "none"
        raise BadInput(
            f"train.tensor_parallel is {size}: it needs a plan of the model's layers, and transformers has {what} for "
            f"{config.model_type}. Set train.tensor_parallel to 1 and train.zero_stage to 3."
        )
    for name in DIVIDED:
        if (getattr(config, name, None) or 0) % size:
            raise BadInput(
                f"train.tensor_parallel is {size}, and the model's {name} is {getattr(config, name)}: it must be a "
                "multiple. Set train.tensor_parallel to a divisor of it."
            )


def cut(model: nn.Module) -> int:
    """Elements of all matrices of a whole model that are cut: of the linear layers that its plan names."""
    named = [
        re.compile(rf"(.*\.)?{re.escape(name).replace(re.escape('*'), '[^.]+')}")
        for name, style in model.config.base_model_tp_plan.items()  # type: ignore[operator, union-attr]
        if style in ("colwise", "rowwise")
    ]
    return sum(
        module.weight.numel()
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and any(one.fullmatch(name) for one in named)
    )


def windows(module: nn.Module) -> dict[str, Window]:
    """Where this rank's shard of each cut parameter lies, from what DeepSpeed notes beside it."""
    from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META

    group = _group()
    rank = distributed.get_rank(group)
    found = {}
    for name, parameter in module.named_parameters():
        noted = getattr(parameter, DS_AUTOTP_UC_META, None)
        if noted is None or noted["partition_dim"] is None:
            continue
        dim, sizes, shape = noted["partition_dim"], noted["partition_sizes"], noted["logical_shape"]
        inner = math.prod(shape[dim + 1 :])
        found[name] = Window(sum(sizes[:rank]) * inner, sizes[rank] * inner, shape[dim] * inner)
    return found


def norm(own: float, *, cut: bool) -> float:
    """The norm of a gradient from that of this rank's part; all ranks of a group together."""
    if not cut:
        return own
    total = torch.tensor(own * own, dtype=torch.float64)
    distributed.all_reduce(total, group=_group())
    return math.sqrt(float(total))


@contextmanager
def whole(module: nn.Module, cut: dict[str, Window]) -> Iterator[None]:
    """Have every parameter whole on every rank, to be read only; all ranks together."""
    kept: list[tuple[nn.Parameter, Tensor]] = []
    try:
        for name, parameter in module.named_parameters():
            if name in cut:
                kept.append((parameter, parameter.data))
                parameter.data = _gathered(parameter)
        yield
    finally:
        # The very memory that the optimizer writes to, not a copy.
        for parameter, shard in kept:
            parameter.data = shard


def _gathered(parameter: nn.Parameter) -> Tensor:
    from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META

    group, noted = _group(), getattr(parameter, DS_AUTOTP_UC_META)
    shards = [torch.empty_like(parameter.data) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(shards, parameter.data.contiguous(), group=group)
    return torch.cat(shards, dim=noted["partition_dim"])


def _group() -> Any:
    from deepspeed.utils import groups

    return groups.get_tensor_model_parallel_group()
