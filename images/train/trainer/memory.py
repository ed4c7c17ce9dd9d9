"""What a training on cards takes of each of them: bytes by kind, from shapes alone.

Mixed precision with Adam: 2 bytes of weights and 2 of gradients in bfloat16, 12 of optimizer (float32 weights and two
moments) for each parameter that learns. Source: Rajbhandari et al. 2020, "ZeRO", section 3.1; stage 1 shares the
optimizer among the ranks, 2 the gradients too, 3 the weights too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from refit.spec import Train

Method = Literal["full", "lora", "qlora"]
METHODS: tuple[Method, ...] = ("full", "lora", "qlora")
"""What a spec can ask for; qlora is never chosen unasked, only named as a way out."""

WEIGHT, GRADIENT, OPTIMIZER = 2, 2, 12

QUANTIZED = (4 + 0.127) / 8
"""Bytes of a 4-bit weight with its doubly quantized constants. Source: Dettmers et al. 2023, "QLoRA", section 3."""

BUCKET = 500_000_000
"""DeepSpeed's `reduce_bucket_size`: elements of gradients that are brought together for one message."""
LIVE = 1_000_000_000
"""DeepSpeed's `stage3_max_live_parameters`: weights that stage 3 keeps gathered from all ranks."""

RUNTIME = 3 << 29
"""1.5 GiB for CUDA's context, cuBLAS's workspaces and NCCL's buffers. Assumed; it differs by card and driver."""

HEADROOM = 0.05
"""Share of a card that is left alone: torch's allocator cannot use every gap. Assumed."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a dense decoder."""

    parameters: int
    """All of them, tied ones once."""
    layers: int
    hidden: int
    heads: int
    queries: int
    """Width of a layer's queries: heads times their width."""
    keys: int
    """Width of its keys, which is that of its values; less than `queries` with grouped queries."""
    inner: int
    gated: bool
    """Whether a gate is multiplied with the inner layer (SwiGLU, as in Llama and Qwen)."""
    vocabulary: int
    ends: int
    """Parameters of embedding and head, tied ones once."""
    adapter: int
    """Parameters of LoRA at rank 1 on every linear layer but the head: the sum of their inputs and outputs."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a training lies on its cards."""

    method: Method
    lora_rank: int
    ranks: int
    stage: int = 0
    checkpointing: bool = False
    """Keep a layer's input only, and compute the layer again on the way back."""
    micro_batch: int = 1


def trainable(shape: Shape, layout: Layout) -> int:
    """Parameters that learn."""
    return shape.parameters if layout.method == "full" else shape.adapter * layout.lora_rank


def bytes_per_rank(shape: Shape, layout: Layout, *, length: int, targets: float) -> dict[str, int]:
    """Bytes of one rank by kind, for packs of `length` tokens of which `targets` are learnt from.

    The float32 copy of a rank's gradients at the optimizer step is left out: activations are gone by then.
    """
    learn, ranks, stage = trainable(shape, layout), layout.ranks, layout.stage
    weights = _weights(shape, layout) + WEIGHT * (0 if layout.method == "full" else learn)
    own = weights / ranks if stage >= 3 else weights
    tokens = layout.micro_batch * length
    return {
        "weights": round(own),
        "gradients": round(GRADIENT * learn / (ranks if stage >= 2 else 1)),
        "optimizer": round(OPTIMIZER * learn / (ranks if stage >= 1 else 1)),
        "activations": round(tokens * activations_per_token(shape, checkpointing=layout.checkpointing)),
        # float32 log probabilities, their gradient and that of the logits, at the targets only (objective.py).
        "logits": round(3 * 4 * layout.micro_batch * targets * shape.vocabulary),
        "buffers": round(_bucket(learn, ranks) + min(_gathered(shape), weights - own)),
        "runtime": RUNTIME,
    }


def in_float32(shape: Shape, layout: Layout) -> int:
    """Bytes of one rank beyond `bytes_per_rank`, where weights and gradients that learn are float32, 4 bytes each.

    This trainer's are, and autocast keeps a copy of 2 bytes of each weight from forward to backward. Where ZeRO does
    not copy the weights that it updates (stages 0 and 3) 4 bytes less are the optimizer's. At stage 3 frozen ones are
    float32 too, for it shares out weights of one type only; so are embedding and head beside weights in 4 bits.
    """
    learn, ranks, stage = trainable(shape, layout), layout.ranks, layout.stage
    base = shape.parameters if layout.method == "lora" and stage >= 3 else 0
    held = (learn + base) * 2 / (ranks if stage >= 3 else 1)
    gradients = learn * 2 / (ranks if stage >= 2 else 1)
    copies = (learn + base + (shape.ends if layout.method == "qlora" else 0)) * 2
    uncopied = {0: 4 * learn, 3: 4 * learn / ranks}.get(stage, 0)
    return round(held + gradients + copies - uncopied)


def explained(layout: Layout, *, length: int) -> dict[str, str]:
    """What each kind of `bytes_per_rank` is, in a few words."""

    def shared(from_stage: int) -> str:
        return f", over {layout.ranks} cards" if layout.stage >= from_stage and layout.ranks > 1 else ""

    kept = "each layer's input, and one layer whole" if layout.checkpointing else "all that the way back needs"
    weights = "4 bits each" if layout.method == "qlora" else f"{WEIGHT} bytes each"
    return {
        "weights": weights + shared(3),
        "gradients": f"{GRADIENT} bytes for each that learns" + shared(2),
        "optimizer": f"{OPTIMIZER} bytes for each that learns" + shared(1),
        "activations": f"{kept}, of {layout.micro_batch} x {length} tokens",
        "logits": "float32, with their gradients, of the tokens that are learnt from",
        "buffers": "gradients on their way" + (", gathered weights" if layout.stage >= 3 else ""),
        "runtime": "CUDA, cuBLAS and NCCL; assumed",
    }


def total(shape: Shape, layout: Layout, *, length: int, targets: float) -> int:
    """Bytes of one rank."""
    return sum(bytes_per_rank(shape, layout, length=length, targets=targets).values())


def usable(memory: float) -> int:
    """What a training may take of a card's memory, in bytes."""
    return int(memory * (1 - HEADROOM))


def largest_micro_batch(shape: Shape, layout: Layout, *, length: int, targets: float, memory: float) -> int:
    """The most packs at once that a card of `memory` bytes has room for; 0 where it has none for one."""
    free = usable(memory) - total(shape, replace(layout, micro_batch=0), length=length, targets=targets)
    one = length * activations_per_token(shape, checkpointing=layout.checkpointing)
    each = one + 3 * 4 * targets * shape.vocabulary
    guess = max(0, int(free // each))
    # The kinds are rounded to whole bytes, each for itself.
    while guess and total(shape, replace(layout, micro_batch=guess), length=length, targets=targets) > usable(memory):
        guess -= 1
    return guess


def activations_per_token(shape: Shape, *, checkpointing: bool) -> float:
    """Bytes that the way back needs of a token, all layers together.

    Counted as in Korthikanti et al. 2022, "Reducing activation recomputation", section 4.1 (their GPT: 34 bytes a
    token, layer and hidden unit), tensor by tensor for a Llama of transformers: no dropout, a gated inner layer,
    norms that compute in float32. Fused attention keeps no scores, so there is no term in length squared. With
    checkpointing a layer keeps its input, and one layer at a time is whole again.
    """
    norm = (4 + 2 + 2) * shape.hidden  # the float32 copy, what is scaled, what the next layers read
    attention = 2 * (2 * shape.queries + 2 * shape.keys)  # queries and the answer, keys and values
    inner = (8 if shape.gated else 4) * shape.inner
    layer = 2 * norm + attention + inner
    kept = 2 * shape.hidden * shape.layers + layer if checkpointing else layer * shape.layers
    return kept + norm  # the last norm, before the head


OFFLOADED = {"none": (), "optimizer": ("gradients", "optimizer"), "all": ("gradients", "optimizer", "weights")}
"""What `train.offload` takes from the cards, by kind."""


def on_cards(train: Train, kinds: Mapping[str, int]) -> dict[str, int]:
    """Of a rank's bytes by kind those that lie on its card: none without cards. The rest is in the host's memory."""
    hosts = ("save", "runtime", *OFFLOADED[train.offload])
    return {kind: size for kind, size in kinds.items() if train.gpus_per_node > 0 and kind not in hosts}


def least(train: Train, kinds: Mapping[str, int]) -> int:
    """Bytes without which a card cannot even begin: what it keeps, or a whole model before ZeRO 3 has shared it out."""
    there = on_cards(train, kinds)
    kept = sum(there.get(kind, 0) for kind in ("weights", "gradients", "optimizer"))
    whole = kinds["weights"] * train.ranks if there and train.zero_stage == 3 else 0
    return max(kept, whole)


def _weights(shape: Shape, layout: Layout) -> float:
    """Bytes of the base model's weights, before any sharing out."""
    if layout.method == "qlora":
        return QUANTIZED * (shape.parameters - shape.ends) + WEIGHT * shape.ends
    return WEIGHT * shape.parameters


def _bucket(learn: int, ranks: int) -> int:
    """Bytes of gradients on their way to the other ranks."""
    return GRADIENT * min(BUCKET, learn) if ranks > 1 else 0


def _gathered(shape: Shape) -> float:
    """Bytes of gathered weights of other ranks at stage 3; that they are no more than those is the caller's to see."""
    block = max(shape.ends, (shape.parameters - shape.ends) // shape.layers)
    return WEIGHT * min(max(LIVE, block), shape.parameters)
