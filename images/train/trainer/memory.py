"""What a training on cards takes of each of them: bytes by kind, from shapes alone.

What learns is kept in float32: 4 bytes of weights, 4 of gradients, 8 of Adam's moments a parameter. Autocast keeps a
bfloat16 copy of each weight from forward to backward. ZeRO's stage 1 shares the optimizer among the ranks, 2 the
gradients too, 3 the weights too (Rajbhandari et al. 2020, "ZeRO", section 3); at 1 and 2 it copies the weights that it
updates. Mixed precision as published there, 2 bytes of weights and 2 of gradients, is not what this trainer does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from refit.spec import Train

Method = Literal["full", "lora", "qlora"]
METHODS: tuple[Method, ...] = ("full", "lora", "qlora")
"""What a spec can ask for; qlora is never chosen unasked, only named as a way out."""

FLOAT32, BFLOAT16 = 4, 2

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
    widest: int = 1
    """The most ranks that can hold its matrices together, of 1, 2, 4 and 8."""
    adapter: int
    """Parameters of LoRA at rank 1 on every linear layer but the head: the sum of their inputs and outputs."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a training lies on its cards."""

    method: Method
    lora_rank: int
    ranks: int
    together: int = 1
    """Ranks that hold each matrix together (tensor parallelism); ZeRO shares out among the groups of them."""
    stage: int = 0
    checkpointing: bool = False
    """Keep a layer's input only, and compute the layer again on the way back."""
    micro_batch: int = 1


def trainable(shape: Shape, layout: Layout) -> int:
    """Parameters that learn."""
    return shape.parameters if layout.method == "full" else shape.adapter * layout.lora_rank


def bytes_per_rank(shape: Shape, layout: Layout, *, length: int, targets: float) -> dict[str, int]:
    """Bytes of one rank by kind, for packs of `length` tokens of which `targets` are learnt from.

    The copy of a rank's gradients at the optimizer step is left out: activations are gone by then.
    """
    groups, stage = layout.ranks // layout.together, layout.stage
    held = _own(shape, layout, shape.parameters)
    learn = held if layout.method == "full" else trainable(shape, layout)
    weights, copies = _weights(shape, layout, held, learn)
    own = weights / groups if stage >= 3 else weights
    moments = (3 if stage in (1, 2) else 2) * FLOAT32  # at these stages a copy of the weights beside both moments
    return {
        "weights": round(own),
        "copies": round(copies),
        "gradients": round(FLOAT32 * learn / (groups if stage >= 2 else 1)),
        "optimizer": round(moments * learn / (groups if stage >= 1 else 1)),
        "activations": round(layout.micro_batch * length * activations_per_token(shape, layout)),
        # float32 log probabilities, their gradient and that of the logits, at the targets only (objective.py).
        "logits": round(3 * 4 * layout.micro_batch * targets * shape.vocabulary),
        "buffers": round(_bucket(learn, layout.ranks) + min(_gathered(shape), weights - own)),
        "runtime": RUNTIME,
    }


def at_start(shape: Shape, layout: Layout) -> int:
    """Bytes of a card before ZeRO 3 has shared out what is whole there: the model in float32. 0 at other stages."""
    return FLOAT32 * shape.parameters + RUNTIME if layout.stage >= 3 else 0


def explained(layout: Layout, *, length: int) -> dict[str, str]:
    """What each kind of `bytes_per_rank` is, in a few words."""

    def shared(from_stage: int) -> str:
        cards = layout.ranks // layout.together
        over = f", over {cards} {'cards' if layout.together == 1 else 'groups'}"
        return over if layout.stage >= from_stage and cards > 1 else ""

    kept = "each layer's input, and one layer whole" if layout.checkpointing else "all that the way back needs"
    weights = {
        "full": "float32" if layout.together == 1 else f"float32, matrices over {layout.together} cards",
        "lora": "float32" if layout.stage >= 3 else "bfloat16; what learns in float32",
        "qlora": "4 bits each; embedding, head and what learns in float32",
    }
    return {
        "weights": weights[layout.method] + shared(3),
        "copies": "bfloat16, of float32 weights; autocast keeps them until the way back",
        "gradients": "float32, of what learns" + shared(2),
        "optimizer": "two moments in float32" + (", and ZeRO's copy of the weights" if layout.stage in (1, 2) else "")
        + shared(1),
        "activations": f"{kept}, of {layout.micro_batch} x {length} tokens",
        "logits": "float32, with their gradients, of the tokens that are learnt from",
        "buffers": "gradients on their way" + (", gathered weights" if layout.stage >= 3 else ""),
        "runtime": "CUDA, cuBLAS and NCCL; assumed",
    }  # fmt: skip


def total(shape: Shape, layout: Layout, *, length: int, targets: float) -> int:
    """Bytes that a card must have for one rank: in a step or, where that is more, at the start."""
    step = sum(bytes_per_rank(shape, layout, length=length, targets=targets).values())
    return max(step, at_start(shape, layout))


def usable(memory: float) -> int:
    """What a training may take of a card's memory, in bytes."""
    return int(memory * (1 - HEADROOM))


def largest_micro_batch(shape: Shape, layout: Layout, *, length: int, targets: float, memory: float) -> int:
    """The most packs at once that a card of `memory` bytes has room for; 0 where it has none for one."""
    if at_start(shape, layout) > usable(memory):
        return 0
    empty = bytes_per_rank(shape, replace(layout, micro_batch=0), length=length, targets=targets)
    free = usable(memory) - sum(empty.values())
    each = length * activations_per_token(shape, layout) + 3 * 4 * targets * shape.vocabulary
    guess = max(0, int(free // each))
    # The kinds are rounded to whole bytes, each for itself.
    while guess and total(shape, replace(layout, micro_batch=guess), length=length, targets=targets) > usable(memory):
        guess -= 1
    return guess


def activations_per_token(shape: Shape, layout: Layout) -> float:
    """Bytes that the way back needs of a token, all layers together.

    Counted as in Korthikanti et al. 2022, "Reducing activation recomputation", section 4.1 (their GPT: 34 bytes a
    token, layer and hidden unit), tensor by tensor for a Llama of transformers under autocast: no dropout, a gated
    inner layer, norms that compute in float32. Fused attention keeps no scores, so there is no term in length squared.
    With checkpointing a layer keeps its input, and one layer at a time is whole again.
    """
    frozen = layout.method == "lora" and layout.stage < 3
    # What a norm reads, in float32. If it is frozen, its answer in bfloat16, else what its weight learns from.
    norm = (4 + 2 if frozen else 4 + 4) * shape.hidden
    # Between layers all is float32 then, and autocast makes a copy for each matrix that reads it.
    reads = 0 if frozen else 2 * (3 + (2 if shape.gated else 1)) * shape.hidden
    attention = 2 * (2 * shape.queries + 2 * shape.keys)  # queries and the answer, keys and values
    inner = (8 if shape.gated else 4) * shape.inner
    layer = 2 * norm + reads + (attention + inner) / layout.together
    kept = (2 if frozen else 4) * shape.hidden * shape.layers + layer if layout.checkpointing else layer * shape.layers
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


def _own(shape: Shape, layout: Layout, parameters: int) -> float:
    """Of so many parameters those of one rank, before ZeRO: embedding and head are whole on each, matrices are cut."""
    return shape.ends + (parameters - shape.ends) / layout.together


def _weights(shape: Shape, layout: Layout, held: float, learn: float) -> tuple[float, float]:
    """Bytes of weights before ZeRO shares them out, and of the copies that autocast makes of those in float32."""
    if layout.method == "full":
        return FLOAT32 * held, BFLOAT16 * held
    if layout.method == "qlora":
        own = QUANTIZED * (held - shape.ends) + FLOAT32 * (shape.ends + learn)
        return own, BFLOAT16 * (shape.ends + learn)
    if layout.stage >= 3:  # it shares out weights of one type only
        return FLOAT32 * (held + learn), BFLOAT16 * (held + learn)
    return BFLOAT16 * held + FLOAT32 * learn, BFLOAT16 * learn


def _bucket(learn: float, ranks: int) -> float:
    """Bytes of gradients on their way to the other ranks."""
    return FLOAT32 * min(BUCKET, learn) if ranks > 1 else 0


def _gathered(shape: Shape) -> float:
    """Bytes of gathered weights of other ranks at stage 3; that they are no more than those is the caller's to see."""
    block = max(shape.ends, (shape.parameters - shape.ends) // shape.layers)
    return FLOAT32 * min(max(LIVE, block), shape.parameters)
