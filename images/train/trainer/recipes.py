"""Choices of a training on cards, one function each: what is chosen, and why, in one line.

They are pure and know each other only by their arguments; `proposal.py` calls them in order. A threshold has its
source beside it. A rule that we made ourselves says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from trainer.fleet import Goal
from trainer.memory import Method

T = TypeVar("T")

SIZES = {
    125e6: (6e-4, 0.5e6), 350e6: (3e-4, 0.5e6), 760e6: (2.5e-4, 0.5e6), 1.3e9: (2e-4, 1e6), 2.7e9: (1.6e-4, 1e6),
    6.7e9: (1.2e-4, 2e6), 13e9: (1e-4, 2e6), 175e9: (0.6e-4, 3.2e6),
}  # fmt: skip
"""Parameters: learning rate and tokens a step of pretraining. Source: Brown et al. 2020 (GPT-3), table 2.1."""

SFT_SHARE = 1 / 6
"""Full fine-tuning learns at this share of the pretraining rate: meets Llama 2-Chat's 2e-5 (Touvron et al. 2023,
section 3.1) at 7 billion, and carries it to other sizes."""

PREFERENCE_SHARE = {"dpo": 5e-7 / 1.2e-4, "orpo": 5e-6 / 1.2e-4}
"""Likewise of preference losses, at 7 billion: 5e-7 (Zephyr, Tunstall et al. 2023), and ORPO's 5e-6 (its authors'
scripts for Mistral 7B: github.com/xfactlab/orpo). Their answers are likely already, and what pushes them apart has no
end."""

PREFERENCE_TOKENS = 32 * 2 * 1024
"""32 pairs, of two sides of 1,024. Source: Zephyr, and ORPO's scripts for the number of pairs."""

PREFERENCE_WARMUP = 0.1
"""Source: Zephyr."""

LORA_FACTOR = 10
"""LoRA's best rate is ten times that of full fine-tuning at any rank. Source: Schulman et al. 2025, "LoRA without
regret". Meets QLoRA's 2e-4 at 7 billion (Dettmers et al. 2023, table 9)."""

FULL_SFT_TOKENS = 64 * 4096
"""64 sequences of 4,096. Source: Llama 2-Chat, as above."""

LORA_TOKENS = 16 * 4096
"""16 sequences, as QLoRA's; LoRA bears large batches worse than full training (Schulman et al. 2025)."""

LEAST_STEPS = 100
"""A training with fewer steps than this takes smaller ones. Our rule: a schedule needs room to warm up and decay."""

WARMUP_SHARE = 0.03
"""Source: Stanford Alpaca's and QLoRA's recipes."""

BITS_PER_PARAMETER, BITS_PER_TOKEN = 2.0, 1.0
"""What a parameter can hold (Allen-Zhu and Li 2024, "Knowledge capacity scaling laws") and a token of an instruction
set brings (Schulman et al. 2025): above it, LoRA falls behind full training."""

SAVE_BYTES_PER_SECOND = 1e9
"""Speed at which a checkpoint is written. Assumed: one node's disk or store."""

CARD_HOURS_PER_FAILURE = 16_384 * 54 * 24 / 466
"""Llama 3: 466 interruptions in 54 days of 16,384 cards (Dubey et al. 2024, section 3.3.4)."""

WIDE_FROM = 13e9
"""Parameters from which tensor parallelism is worth a thought. Narayanan et al. 2021 stay within a node of 8."""

SHARED = (
    "each card holds everything",
    "cards share the optimizer",
    "cards share optimizer and gradients",
    "cards share optimizer, gradients and weights",
)
"""What each ZeRO stage does."""


@dataclass(frozen=True)
class Choice(Generic[T]):
    """What was chosen, and why."""

    value: T
    why: str


def choose_method(
    goal: Goal, fits: Mapping[Method, bool], *, asked: Method | None, adapter: int, learnt: float
) -> Choice[Method]:
    """Full or LoRA, from the goal, what an adapter of `adapter` parameters can hold of `learnt` tokens, and room."""
    if asked is not None:
        return Choice(asked, "asked for")
    if goal == "pretrain":
        return Choice("full", "plain text holds more than an adapter can (Biderman et al. 2024)")
    if goal == "dpo" and fits["lora"]:
        return Choice("lora", "a pair tells which answer is better, one bit; and an adapter's base is its reference")
    holds, brings = BITS_PER_PARAMETER * adapter, BITS_PER_TOKEN * learnt
    told = f"an adapter holds {holds / 1e6:,.1f} Mbit, {learnt:,.0f} learnt tokens bring {brings / 1e6:,.1f}"
    if brings <= holds:
        return Choice("lora", f"{told}, so it gives up nothing and costs a third less")
    if fits["lora"] and not fits["full"]:
        return Choice("lora", f"{told}, so full would be better; but only LoRA fits")
    return Choice("full", f"{told}, so it would fall behind")


def choose_checkpointing(rooms: Mapping[tuple[bool, int], int]) -> Choice[bool]:
    """Whether to compute activations again, from the `rooms` (packs at once) by checkpointing and ZeRO stage.

    Sharing more among the ranks costs messages that overlap with arithmetic; computing again always costs a
    forward pass.
    """
    if any(room for (again, _), room in rooms.items() if not again):
        return Choice(False, "activations fit; computing them again would cost another forward pass")
    return Choice(True, "activations fit at no ZeRO stage without it; it costs another forward pass")


def choose_stage(rooms: Mapping[int, int]) -> Choice[int]:
    """The lowest ZeRO stage with room for a pack; where there is none, the highest.

    `rooms` are those with gradient checkpointing as it was chosen: arithmetic is dearer than messages.
    """
    fits = [stage for stage, room in sorted(rooms.items()) if room]
    if not fits:
        return Choice(max(rooms), "no stage has room for a single pack")
    stage = fits[0]
    below = "nothing needs to be shared" if stage == 0 else f"stage {stage - 1} has no room for a pack"
    return Choice(stage, f"{SHARED[stage]}; {below}, and a higher one sends more messages")


def choose_batch(goal: Goal, method: Method, *, parameters: int, length: int, packs: int, ranks: int) -> Choice[int]:
    """Packs of one step, all ranks together: by tokens, but with enough steps left, and one for each rank at least."""
    if goal == "pretrain":
        tokens, source = SIZES[_nearest(parameters)][1], "GPT-3's for this size"
    elif goal in PREFERENCE_SHARE:
        tokens, source = float(PREFERENCE_TOKENS), "32 pairs of two sides of 1,024, as Zephyr's"
    elif method == "full":
        tokens, source = float(FULL_SFT_TOKENS), "Llama 2-Chat's 64 sequences of 4,096"
    else:
        tokens, source = float(LORA_TOKENS), "16 sequences of 4,096; LoRA likes small batches"
    wanted, most = max(1, round(tokens / length)), max(1, packs // LEAST_STEPS)
    told = f"{tokens:,.0f} tokens ({source}) are {wanted} packs of {length}"
    if most < wanted:
        told += f"; {most}, so that {packs} packs give {LEAST_STEPS} steps"
    if min(wanted, most) < ranks:
        told += f"; {ranks}, one for each card"
    return Choice(max(ranks, min(wanted, most)), told)


def choose_micro_batch(room: int, *, batch: int, ranks: int) -> Choice[int]:
    """Packs that go through the model at once: as many as there is room for, but not more than a rank's share."""
    share = max(1, batch // ranks)
    if room == 0:
        return Choice(1, "the least there is, and there is no room for it")
    told = "all that a step asks of a card" if share <= room else f"a card has room for {room}"
    return Choice(min(room, share), told)


def choose_accumulation(micro_batch: int, *, batch: int, ranks: int, each: str = "card") -> Choice[int]:
    """Micro batches of one step over all ranks, as the spec counts them: a multiple of the ranks, nearest the batch.

    Where cards hold matrices together, `ranks` are the groups of them, and `each` says so.
    """
    own = max(1, round(batch / (micro_batch * ranks)))
    packs = own * ranks * micro_batch
    return Choice(own * ranks, f"{own} a {each}, so a step learns from {packs} packs")


def choose_learning_rate(goal: Goal, method: Method, *, parameters: int) -> Choice[float]:
    """The peak, by method and size."""
    size = _nearest(parameters)
    pretraining = SIZES[size][0]
    rate, told = pretraining, f"GPT-3's at {size / 1e9:g} billion parameters"
    if goal == "pretrain":
        told = f"{told}: warmed up again to its peak (Ibrahim et al. 2024)"
    elif goal == "sft":
        rate, told = rate * SFT_SHARE, f"a sixth of {told} (Llama 2-Chat: 2e-5 at 7 billion)"
    else:
        share = PREFERENCE_SHARE[goal]
        known = "Zephyr: 5e-7" if goal == "dpo" else "its authors: 5e-6"
        rate, told = rate * share, f"1/{1 / share:.0f} of {told} ({known} at 7 billion)"
    if method != "full":
        rate, told = rate * LORA_FACTOR, f"{told}, times ten for LoRA"
    rate = float(f"{rate:.1e}")
    return Choice(rate, told)


def choose_schedule(goal: Goal) -> Choice[str]:
    """What the rate does after the peak."""
    if goal == "pretrain":
        return Choice("cosine", "decayed again to 0 as in pretraining; mix in 5% of what the base was trained on, "
                      "or it forgets (Ibrahim et al. 2024)")  # fmt: skip
    return Choice(
        "cosine", "down to 0, as Zephyr's does in a straight line" if goal in PREFERENCE_SHARE else "as Llama 2-Chat's"
    )


def choose_warmup(steps: int, goal: Goal = "sft") -> Choice[int]:
    """Steps until the peak."""
    if goal in PREFERENCE_SHARE:
        return Choice(math.ceil(steps * PREFERENCE_WARMUP), f"{PREFERENCE_WARMUP:.0%} of {steps}, as Zephyr's")
    warmup = math.ceil(steps * WARMUP_SHARE)
    return Choice(warmup, f"{WARMUP_SHARE:.0%} of {steps}, as Alpaca's and QLoRA's")


def choose_checkpoint_minutes(size: int, *, ranks: int, most: float) -> Choice[float]:
    """Minutes between checkpoints of `size` bytes: least time lost to saving and to failures, at most `most`.

    Source: Young 1974, "A first order approximation to the optimum checkpoint interval": sqrt(2 save MTBF); failures
    as often as Llama 3 saw them on as many cards.
    """
    save, between = size / SAVE_BYTES_PER_SECOND, CARD_HOURS_PER_FAILURE / ranks * 3600
    best = math.sqrt(2 * save * between) / 60
    told = f"Young's optimum is {best:,.0f} ({save:.3g} s to save at 1 GB/s, a failure in {between / 3600:,.0f} h)"
    if best > most:
        return Choice(most, f"{told}; the spec allows no more to be lost")
    return Choice(round(best, 1), told)


def choose_tensor_parallel(
    goal: Goal, method: Method, *, parameters: int, stage: int, memory: int, rooms: Mapping[int, int]
) -> Choice[int]:
    """How many cards of a node hold each matrix together, of those in `rooms` (packs at once by how many)."""
    if parameters < WIDE_FROM:
        return Choice(1, f"below {WIDE_FROM / 1e9:g} billion parameters ZeRO is enough")
    if method != "full" or stage not in (1, 2) or goal in PREFERENCE_SHARE:
        return Choice(1, "it goes with full training at ZeRO 1 or 2, and not with pairs")
    fits = sorted(degree for degree, room in rooms.items() if room)
    if not fits:
        return Choice(1, "the model's matrices, or the cards of a node, are not to be divided so")
    # Our rule: so many cards that weights and gradients of 4 bytes each take half of their memory.
    degree = next((degree for degree in fits if 8 * parameters / degree <= memory / 2), fits[-1])
    return Choice(degree, "cards of a node hold each matrix together, so that more packs fit on them")


def choose_pipeline_parallel() -> Choice[int]:
    """How many groups of cards hold a stretch of layers each: nobody does that yet, and this is its place."""
    return Choice(1, "comes later; ZeRO and tensor parallelism share a model out until then")


def _nearest(parameters: int) -> float:
    return min(SIZES, key=lambda size: abs(math.log(parameters / size)))
