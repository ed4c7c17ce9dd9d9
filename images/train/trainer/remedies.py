"""What would make a training fit that does not: each way tried with the numbers, and named only if it works."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from refit.spec.training import OF_PAIRS
from trainer.fleet import GIB, Cards, Goal
from trainer.memory import (
    FLOAT32,
    HEADROOM,
    Layout,
    Shape,
    at_start,
    bytes_per_rank,
    largest_micro_batch,
    total,
    trainable,
    usable,
)
from trainer.packs import Packs

MOST_CARDS = 4096
NAMES = {"full": "full", "lora": "LoRA", "qlora": "QLoRA"}


def leanest(layout: Layout) -> Layout:
    """The layout that takes least of a card: one pack, computed again on the way back, and shared what saves room.

    Frozen weights are not: stage 3 would keep them in float32, and those in 4 bits it does not share out.
    """
    stage = (3 if layout.method == "full" else 2) if layout.ranks > 1 else 0
    return replace(layout, stage=stage, checkpointing=True, micro_batch=1, together=1)


def refusal(shape: Shape, layout: Layout, packs: Packs, cards: Cards, goal: Goal) -> str:
    """Why a training does not fit on these cards, and what would."""
    lean = leanest(layout)
    kinds = bytes_per_rank(shape, lean, length=packs.length, targets=packs.targets)
    needed, most = sum(kinds.values()), max(kinds, key=lambda kind: kinds[kind])
    part = f"{kinds[most] / GIB:.1f} of it {most}"
    if (start := at_start(shape, lean)) > needed:
        needed, part = start, "where the whole model lies in float32 before it is shared out"
    ways = list(_ways(shape, layout, packs, cards, goal))
    what = f"{NAMES[layout.method]} training of {shape.parameters / 1e9:.1f} billion parameters"
    return (
        f"this does not fit, because {what} takes {needed / GIB:.1f} GiB of each card even at its leanest "
        f"(ZeRO {lean.stage}, one pack at once, gradient checkpointing), {part}, and "
        f"{usable(cards.memory) / GIB:.1f} of {cards.memory / GIB:.1f} GiB can be used; what would: {'; '.join(ways)}"
    )


def number(cards: int) -> str:
    """So many cards, in words."""
    return "1 card" if cards == 1 else f"{cards:,} cards"


def _ways(shape: Shape, layout: Layout, packs: Packs, cards: Cards, goal: Goal) -> Iterator[str]:
    more = _cards_needed(shape, layout, packs, cards)
    if more:
        yield f"{number(more)} like these, at ZeRO stage {leanest(replace(layout, ranks=more)).stage}"
    degrees = [size for size in (2, 4, 8) if size <= shape.widest and cards.count % size == 0]
    for size in degrees if layout.method == "full" and goal not in OF_PAIRS else ():
        cut = replace(leanest(layout), stage=2, together=size)  # there is no moment at which the model is whole
        if _fits(shape, cut, packs, cards):
            yield f"{size} cards that hold each matrix together (train.tensor_parallel {size}, at ZeRO 2)"
            break
    if goal != "pretrain" and layout.method == "full":
        lora = leanest(replace(layout, method="lora"))
        if _fits(shape, lora, packs, cards):
            yield f"LoRA on these (--method lora), which takes {_gib(shape, lora, packs)} at its leanest"
    if goal != "pretrain":
        four_bit = leanest(replace(layout, method="qlora"))
        if _fits(shape, four_bit, packs, cards):
            yield f"QLoRA on these (weights in 4 bits, --method qlora), which takes {_gib(shape, four_bit, packs)}"
    lean = leanest(layout)
    kinds = bytes_per_rank(shape, lean, length=packs.length, targets=packs.targets)
    left = max(sum(kinds.values()) - kinds["optimizer"], at_start(shape, lean))
    if left <= usable(cards.memory):
        host = 3 * FLOAT32 * trainable(shape, layout) / GIB  # with a copy of the weights, at stage 3 too
        yield (
            f"the optimizer in the host's memory (train.offload: optimizer, at ZeRO 1 to 3): {left / GIB:.1f} GiB stay "
            f"on a card, {host:.0f} GiB go to the host"
        )
    half = replace(packs, length=packs.length // 2, targets=packs.targets / 2)
    if half.length and _fits(shape, lean, half, cards):
        yield f"packs of {half.length} instead of {packs.length}"
    memory = total(shape, lean, length=packs.length, targets=packs.targets) / (1 - HEADROOM)
    yield f"cards of {math.ceil(memory / GIB)} GiB"


def _cards_needed(shape: Shape, layout: Layout, packs: Packs, cards: Cards) -> int | None:
    """The fewest cards on which it fits; more of them never take more of each."""
    low, high = layout.ranks, MOST_CARDS
    if low >= high or not _fits(shape, leanest(replace(layout, ranks=high)), packs, cards):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if _fits(shape, leanest(replace(layout, ranks=middle)), packs, cards):
            high = middle
        else:
            low = middle
    return high


def _fits(shape: Shape, layout: Layout, packs: Packs, cards: Cards) -> bool:
    return largest_micro_batch(shape, layout, length=packs.length, targets=packs.targets, memory=cards.memory) > 0


def _gib(shape: Shape, layout: Layout, packs: Packs) -> str:
    return f"{total(shape, layout, length=packs.length, targets=packs.targets) / GIB:.1f} GiB of each"
