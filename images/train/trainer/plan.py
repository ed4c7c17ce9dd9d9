"""The plan of a recipe on this machine: what it will take, with every number explained, before it is started.

Shapes come from the base model's config alone, so a plan costs seconds for any size of model. `proposal.py` plans for
cards that are elsewhere, and chooses the recipe.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from refit.spec import Train
from trainer import tables, tensor_parallel
from trainer.fleet import DEFAULT, KNOWN, UTILISATION
from trainer.machine import arithmetic, cores, memory_bytes
from trainer.memory import QUANTIZED, on_cards
from trainer.objective import attention_for
from trainer.packs import Packs, learnt, reference_tokens
from trainer.shapes import count, text_config, trained_model
from trainer.tables import gib

RUNTIME_BYTES = 700 << 20
"""What a rank's interpreter and libraries take before any model; measured."""

ASSUMED_UTILISATION = 0.5
"""Share of the speed of a plain matrix product that training reaches on a CPU; used until a smoke run has measured."""


def make(train: Train, base: Path, packs: Packs, *, smoke: dict[str, Any] | None = None) -> dict[str, Any]:
    """The plan of a recipe on a base model; `smoke` is what a smoke run measured, if there was one."""
    model = trained_model(base, train)
    parameters, trainable = count(model)
    dtype = arithmetic(train)
    per_step = train.micro_batch * train.accumulation
    tokens_per_step = per_step * packs.tokens
    epochs = train.max_steps * per_step / packs.count if packs.count else None
    tokens = train.max_steps * tokens_per_step
    once = packs.tokens * (packs.count or train.max_steps * per_step)
    asked_once = "full" if train.warm_start else train.method  # then a fresh adapter is no reference
    read = reference_tokens(train.objective, asked_once, tokens=tokens, once=once)
    reference = 2 * parameters * read
    flops = flops_of(parameters, trainable, tokens) + reference
    memory = memory_of(
        train, text_config(model), parameters, trainable, dtype=dtype, length=packs.length,
        targets=train.micro_batch * packs.targets, cut=_cut(train, model),
    )  # fmt: skip
    seconds, why_seconds = _seconds(train, flops, dtype, smoke)
    cards = sum(on_cards(train, memory).values())
    needed, available = (sum(memory.values()) - cards) * train.ranks, memory_bytes()
    share = f"{learnt(train.objective):.0%}"
    why = [
        f"{train.method}: {trainable:,} of {parameters:,} parameters are trained ({trainable / parameters:.1%})",
        f"a step learns from {per_step} packs of {packs.length} ({tokens_per_step:,.0f} tokens): micro batch "
        f"{train.micro_batch}, {train.accumulation} of them, dealt out to {train.ranks} rank(s)",
        f"{train.max_steps} steps see {epochs:.2f} times the {packs.count} packs"
        if epochs is not None
        else f"no data given: packs are taken to be full, and {share} of their tokens to be learnt",
        f"arithmetic in {dtype}, trained weights and optimizer in float32, ZeRO stage {train.zero_stage}",
        why_seconds,
    ]
    if train.warm_start:
        why.append(f"begins with the weights of {train.warm_start}, a fresh optimizer, and {train.warmup_steps} steps "
                   "of warm-up")  # fmt: skip
    if cards:
        why.append(
            f"of each card's memory about {gib(cards)}, of the host's {gib(needed)} in all; whether a card has room is "
            "seen by preflight as far as weights and optimizer go, and by the smoke run"
        )
    if train.of_pairs:
        why.append(
            f"{train.objective}: a pair is two sequences in one pack; the reference model reads {read:,.0f} tokens "
            f"forward ({reference / flops:.0%} of the arithmetic), and no second model is in memory"
        )
    if needed > available:
        why.append(
            f"this does not fit, because {gib(needed)} are needed and {gib(available)} are available; what would: a "
            "smaller train.micro_batch, train.method lora, or a higher train.zero_stage on more machines"
        )
    return {
        "parameters": parameters, "trainable": trainable, "method": train.method, "zero_stage": train.zero_stage,
        "micro_batch": train.micro_batch, "accumulation": train.accumulation, "ranks": train.ranks, "dtype": dtype,
        "steps": train.max_steps, "tokens": round(tokens), "epochs": epochs,
        "goal": train.objective, "flops": flops, "flops_of_reference": reference,
        "bytes_per_rank": memory, "bytes_needed": needed, "bytes_available": available,
        "fits": needed <= available, "seconds": seconds, "hours": seconds / 3600, "measured": smoke is not None,
        "checkpoint_bytes": 12 * trainable, "why": why,
    }  # fmt: skip


def flops_of(parameters: int, trainable: int, tokens: float) -> float:
    """Floating point operations: 2 a weight and token forward, 2 back to the inputs, 2 to the weights that learn.

    Source: Kaplan et al. 2020, "Scaling laws for neural language models": 6ND where all weights learn.
    """
    return tokens * (4 * parameters + 2 * trainable)


def memory_of(
    train: Train, config: Any, parameters: int, trainable: int, *, dtype: str, length: int, targets: float, cut: int = 0
) -> dict[str, int]:
    """Bytes of one rank by kind. Of the parameters, `cut` are in matrices that `train.tensor_parallel` ranks hold.

    Activations after Korthikanti et al. 2022 (34 s b h + 5 a s² b bytes a layer in 16 bit, of which ranks that hold
    matrices together share 24 s b h and the scores), doubled for float32 and for the copies that autocast keeps for the
    backward pass.
    """
    together, stage = train.tensor_parallel, train.zero_stage
    ranks = train.ranks // together  # ZeRO shares out among the groups
    away = cut - cut // together
    parameters, trainable = parameters - away, trainable - away  # what is cut learns, by the spec
    frozen = parameters - trainable
    least = {"optimizer": 1, "gradients": 2, "weights": 3}
    shared = {kind: ranks if stage >= first else 1 for kind, first in least.items()}
    size: float = 2 if dtype == "bfloat16" and train.method == "lora" and stage < 3 else 4
    if train.method == "qlora":
        size = QUANTIZED
    hidden, layers = config.hidden_size, config.num_hidden_layers
    heads = getattr(config, "num_attention_heads", None) or 0  # a model that carries a state along has no scores
    scores = 5 * heads / together * length if attention_for(length, card=train.gpus_per_node > 0) == "eager" else 0
    copied = stage in (1, 2) or (stage == 3 and train.offload != "none")
    layer = (10 + 24 / together) * hidden + scores
    kept = 2 * hidden * layers + layer if train.checkpoint_activations else layer * layers
    return {
        "weights": round((frozen * size + trainable * 4) / shared["weights"]),
        "gradients": round(trainable * 4 / shared["gradients"]),
        # Two moments, and where ZeRO updates a copy of the weights that copy.
        "optimizer": round(trainable * (12 if copied else 8) / shared["optimizer"]),
        "activations": round(2 * train.micro_batch * length * kept),
        "logits": round(3 * 4 * targets * config.vocab_size),
        # The saver's copy, kept from the first save on: weights and moments in float32. At ZeRO 0 rank 0 has all of it,
        # above each its part; either way it is this much for all ranks of this machine together.
        "save": round(12 * (trainable + away) / train.ranks),
        "runtime": RUNTIME_BYTES,
    }


def _cut(train: Train, model: nn.Module) -> int:
    """Elements of the matrices that ranks hold together: none without tensor parallelism.

    Raises:
        BadInput: this model's cannot be cut so.
    """
    if train.tensor_parallel == 1:
        return 0
    tensor_parallel.check(model.config, train.tensor_parallel)
    return tensor_parallel.cut(model)


def show(plan: dict[str, Any]) -> None:
    """The plan as a table for people."""
    tables.show(
        [
            ("parameters", f"{plan['parameters']:,}", ""),
            ("trained", f"{plan['trainable']:,} ({plan['method']}, ZeRO {plan['zero_stage']}, {plan['dtype']})", ""),
            ("steps", f"{plan['steps']:,} ({plan['tokens']:,} tokens)", ""),
            ("arithmetic", f"{plan['flops']:.3g} FLOP", ""),
            *((f"memory: {kind}", gib(size), "") for kind, size in plan["bytes_per_rank"].items()),
            ("memory: all ranks", f"{gib(plan['bytes_needed'])} of {gib(plan['bytes_available'])} free", ""),
            ("checkpoint", gib(plan["checkpoint_bytes"]), ""),
            ("time", f"{plan['seconds'] / 60:.1f} min ({'measured' if plan['measured'] else 'estimated'})", ""),
        ],
        plan["why"],
    )


def _seconds(train: Train, flops: float, dtype: str, smoke: dict[str, Any] | None) -> tuple[float, str]:
    if smoke is not None:
        seconds = smoke["seconds_per_step"] * train.max_steps
        return seconds, f"time: the smoke run took {smoke['seconds_per_step']:.2f} s a step on this kind of machine"
    if train.gpus_per_node > 0:
        peak = train.peak_flops or KNOWN[DEFAULT][0]
        of = "train.peak_flops" if train.peak_flops else f"{DEFAULT}, for train.peak_flops is not set"
        return flops / (peak * UTILISATION * train.ranks), (
            f"time: {UTILISATION:.0%} of {peak:.3g} FLOP/s ({of}) on {train.ranks} card(s) is assumed. A smoke run "
            "measures it"
        )
    speed = product_flops_per_second(dtype) * ASSUMED_UTILISATION
    return flops / speed, (
        f"time: a matrix product runs at {speed / ASSUMED_UTILISATION / 1e9:.0f} GFLOP/s here on {cores()} core(s); "
        "half of that is assumed. A smoke run measures it"
    )


def product_flops_per_second(dtype: str) -> float:
    """The speed of a matrix product of a typical layer here and now."""
    kind = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    left, right = torch.ones(512, 1024, dtype=kind), torch.ones(1024, 1024, dtype=kind)
    left @ right
    rounds, began = 8, time.perf_counter()
    for _ in range(rounds):
        left @ right
    return rounds * 2 * 512 * 1024 * 1024 / (time.perf_counter() - began)
