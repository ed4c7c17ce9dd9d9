"""The plan for cards: the recipe that suits them is chosen, and what it takes is said.

Everything here is arithmetic on shapes: no torch, no card, no weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from refit.spec import Train
from trainer import recipes, tables
from trainer.fleet import Cards, Goal
from trainer.memory import (
    METHODS,
    Layout,
    Method,
    Shape,
    at_start,
    bytes_per_rank,
    explained,
    largest_micro_batch,
    total,
    trainable,
    usable,
)
from trainer.packs import Packs, reference_tokens
from trainer.recipes import Choice
from trainer.remedies import number, refusal
from trainer.tables import Row, gib

NODE = 8
"""Cards of one node."""

PAIRED = {
    "dpo": "a pair is two sequences in one pack; the reference is the base with its adapter off, or what it said "
    "before a full training: no second model is in memory",
    "orpo": "a pair is two sequences in one pack; there is no reference model",
}
"""What to know of a training on preference pairs."""

CHECKPOINT = 12
"""Bytes of a checkpoint for each parameter that learns: weights and two moments in float32."""


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A recipe for cards: how it lies on them, and each choice with its reason."""

    layout: Layout
    choices: dict[str, Choice[Any]]
    fits: bool
    packs: int
    """Of the whole training: the spec's steps times its batch."""
    steps: int


def propose(
    train: Train, shape: Shape, packs: Packs, cards: Cards, *, goal: Goal = "sft", asked: Method | None = None
) -> dict[str, Any]:
    """The plan for a model on cards; of the spec only how much is learnt from, and what may be lost, is kept.

    Returns:
        What `plan.make` returns for this machine, and the choices: `recipe` and `reasons` by name, `sets` as --set
        takes them.
    """
    chosen = choose(train, shape, packs, cards, goal=goal, asked=asked)
    layout, recipe = chosen.layout, {name: choice.value for name, choice in chosen.choices.items()}
    learn, tokens = trainable(shape, layout), chosen.packs * packs.tokens
    memory = bytes_per_rank(shape, layout, length=packs.length, targets=packs.targets)
    once = packs.tokens * (packs.count or chosen.packs)
    read = reference_tokens(goal, layout.method, tokens=tokens, once=once)
    time = _time(shape, layout, tokens, packs.length, cards, reference=read)
    return {
        "parameters": shape.parameters + (0 if layout.method == "full" else learn), "trainable": learn, "goal": goal,
        **recipe, "ranks": cards.count, "dtype": "bfloat16", "steps": chosen.steps, "tokens": round(tokens),
        "epochs": chosen.packs / packs.count if packs.count else None,
        "bytes_per_rank": memory, "bytes_why": explained(layout, length=packs.length),
        "bytes_needed": total(shape, layout, length=packs.length, targets=packs.targets) * cards.count,
        "bytes_available": usable(cards.memory) * cards.count, "fits": chosen.fits, "measured": False, **time,
        "gpus": cards.count, "gpu_memory": cards.memory, "gpu_flops": cards.flops, "mfu": cards.mfu,
        "cost": None if cards.price is None else time["gpu_hours"] * cards.price,
        "checkpoint_bytes": CHECKPOINT * learn, "recipe": recipe,
        "sets": _sets(goal, recipe, chosen.steps, cards.count),
        "reasons": {name: choice.why for name, choice in chosen.choices.items()},
        "why": [
            *(f"{name} {_value(choice.value)}: {choice.why}" for name, choice in chosen.choices.items()),
            *_remarks(shape, chosen, packs, cards, goal),
        ],
    }  # fmt: skip


def choose(train: Train, shape: Shape, packs: Packs, cards: Cards, *, goal: Goal, asked: Method | None) -> Chosen:
    """Every choice in turn, each from those before it."""
    ranks, amount = cards.count, train.max_steps * train.micro_batch * train.accumulation
    rooms = {method: _rooms(method, train, shape, packs, cards) for method in METHODS}
    fits: dict[Method, bool] = {method: any(rooms[method].values()) for method in METHODS}
    learnt = packs.targets * (min(packs.count, amount) if packs.count else amount)
    method = recipes.choose_method(goal, fits, asked=asked, adapter=shape.adapter * train.lora.rank, learnt=learnt)
    again = recipes.choose_checkpointing(rooms[method.value])
    room = {stage: fitting for (on, stage), fitting in rooms[method.value].items() if on == again.value}
    stage = recipes.choose_stage(room)
    layout = Layout(
        method=method.value, lora_rank=train.lora.rank, ranks=ranks, stage=stage.value, checkpointing=again.value
    )
    together = recipes.choose_tensor_parallel(
        goal, method.value, parameters=shape.parameters, stage=stage.value, memory=cards.memory,
        rooms=_rooms_together(shape, layout, packs, cards),
    )  # fmt: skip
    sharing = ranks // together.value  # who holds matrices together sees the same packs
    batch = recipes.choose_batch(
        goal, method.value, parameters=shape.parameters, length=packs.length, packs=amount, ranks=sharing
    )
    layout = replace(layout, together=together.value)
    micro = recipes.choose_micro_batch(_room(shape, layout, packs, cards), batch=batch.value, ranks=sharing)
    each = "card" if together.value == 1 else "group"
    accumulation = recipes.choose_accumulation(micro.value, batch=batch.value, ranks=sharing, each=each)
    steps = math.ceil(amount / (micro.value * accumulation.value))
    layout = replace(layout, micro_batch=micro.value)
    choices: dict[str, Choice[Any]] = {
        "method": method, "zero_stage": stage, "gradient_checkpointing": again, "tensor_parallel": together,
        "pipeline_parallel": recipes.choose_pipeline_parallel(), "global_batch": batch, "micro_batch": micro,
        "accumulation": accumulation,
        "learning_rate": recipes.choose_learning_rate(goal, method.value, parameters=shape.parameters),
        "warmup_steps": recipes.choose_warmup(steps, goal),
        "schedule": recipes.choose_schedule(goal),
        "checkpoint_minutes": recipes.choose_checkpoint_minutes(
            CHECKPOINT * trainable(shape, layout), ranks=ranks, most=train.checkpoint.every_minutes
        ),
    }  # fmt: skip
    return Chosen(layout=layout, choices=choices, fits=fits[method.value], packs=amount, steps=steps)


def show(plan: dict[str, Any]) -> None:
    """The plan as a table for people."""
    share = plan["flops_of_weights"] / plan["flops"]
    learn = "all" if plan["trainable"] == plan["parameters"] else f"{plan['trainable']:,}"
    card = plan["bytes_needed"] / plan["gpus"]
    epochs = "" if plan["epochs"] is None else f", {plan['epochs']:.2f} times the data"
    speed = f"{number(plan['gpus'])} of {plan['gpu_flops'] / 1e12:g} TFLOP/s at an MFU of {plan['mfu']:.0%}, assumed"
    room = f"of {gib(plan['bytes_available'] / plan['gpus'])} that can be used"
    of_weights = f"6ND, 4ND where weights are frozen: {share:.0%}; the rest is attention"
    if plan["flops_of_reference"]:
        of_weights += f", and {plan['flops_of_reference'] / plan['flops']:.0%} the reference model's forward pass"
    rows: list[Row] = [
        ("parameters", f"{plan['parameters']:,}", f"{learn} of them learn"),
        ("tokens", f"{plan['tokens']:,}", f"{plan['steps']:,} steps{epochs}"),
        *((name.replace("_", " "), _value(value), plan["reasons"][name]) for name, value in plan["recipe"].items()),
        *((f"memory: {kind}", gib(size), plan["bytes_why"][kind]) for kind, size in plan["bytes_per_rank"].items()),
        ("memory of a card", gib(card), f"{room}; {'it fits' if plan['fits'] else 'it does not fit'}"),
        ("arithmetic", f"{plan['flops']:.3g} FLOP", of_weights),
        ("hours", f"{plan['hours']:,.2f}", speed),
        ("card hours", f"{plan['gpu_hours']:,.2f}", ""),
        *([] if plan["cost"] is None else [("cost", f"{plan['cost']:,.2f}", "")]),
        ("checkpoint", gib(plan["checkpoint_bytes"]), "weights and optimizer of what learns"),
    ]
    tables.show(rows, plan["why"][len(plan["recipe"]) :])


def _rooms(method: Method, train: Train, shape: Shape, packs: Packs, cards: Cards) -> dict[tuple[bool, int], int]:
    """Packs that a card has room for, by gradient checkpointing and ZeRO stage.

    A card alone shares with nobody. Frozen weights are not shared out: in 4 bits they cannot be, and stage 3 would
    keep them in float32.
    """
    layout = Layout(method=method, lora_rank=train.lora.rank, ranks=cards.count)
    return {
        (again, stage): _room(shape, replace(layout, stage=stage, checkpointing=again), packs, cards)
        for again in (False, True)
        for stage in (range(4 if method == "full" else 3) if cards.count > 1 else (0,))
    }


def _rooms_together(shape: Shape, layout: Layout, packs: Packs, cards: Cards) -> dict[int, int]:
    """Packs that a card has room for, by how many of a node hold each matrix together."""
    degrees = [size for size in (2, 4, 8) if size <= shape.widest and _node(cards.count) % size == 0]
    return {size: _room(shape, replace(layout, together=size), packs, cards) for size in degrees}


def _room(shape: Shape, layout: Layout, packs: Packs, cards: Cards) -> int:
    return largest_micro_batch(shape, layout, length=packs.length, targets=packs.targets, memory=cards.memory)


def _node(ranks: int) -> int:
    """Cards of each node."""
    return next(size for size in range(min(ranks, NODE), 0, -1) if ranks % size == 0)


def _time(
    shape: Shape, layout: Layout, tokens: float, length: int, cards: Cards, *, reference: float
) -> dict[str, float]:
    """Arithmetic and time. MFU counts what the model needs; what is computed again is added to the time only. The
    reference model reads `reference` tokens, forward.

    Source: Kaplan et al. 2020 (2 operations a weight and token forward, 2 back to the inputs, 2 to weights that learn);
    Chowdhery et al. 2022 (PaLM), appendix B, for attention, halved because a token sees only those before it.
    """
    frozen = 0 if layout.method == "full" else shape.parameters
    of_weights = tokens * (6 * trainable(shape, layout) + 4 * frozen)
    forward = 2 * length * shape.queries * shape.layers * tokens
    of_reference = reference * (2 * shape.parameters + forward / tokens)
    flops = of_weights + 3 * forward + of_reference
    done = flops + (2 * tokens * shape.parameters + forward if layout.checkpointing else 0)
    seconds = done / (cards.count * cards.flops * cards.mfu)
    return {
        "flops": flops, "flops_of_weights": of_weights, "flops_of_reference": of_reference,
        "seconds": seconds, "hours": seconds / 3600,
        "gpu_hours": seconds / 3600 * cards.count,
    }  # fmt: skip


def _remarks(shape: Shape, chosen: Chosen, packs: Packs, cards: Cards, goal: Goal) -> list[str]:
    amount = f"{chosen.packs} packs in all, as the spec's steps times its batch"
    share = packs.targets / packs.length
    blind = f"no data given: packs are taken to be full, and {share:.0%} of their tokens to be learnt from"
    remarks = [
        f"{amount}; there are {packs.count}" if packs.count else f"{amount}; {blind}",
        _counted(shape, chosen.layout),
        f"saving keeps a copy in the hosts' memory: {gib(CHECKPOINT * trainable(shape, chosen.layout))} in all, shared "
        "out as the optimizer is",
    ]
    if goal in PAIRED:
        remarks.append(PAIRED[goal])
    if not chosen.fits:
        remarks.append(refusal(shape, chosen.layout, packs, cards, goal))
    return remarks


def _counted(shape: Shape, layout: Layout) -> str:
    """What stands behind the bytes, and what is not a kind of its own."""
    said = "what learns is kept in float32: mixed precision as published, in 2 bytes, would take less of a card"
    if start := at_start(shape, layout):
        said += f"; before ZeRO 3 shares the model out it is whole on each, and takes {gib(start)}"
    return said


def _sets(goal: Goal, recipe: dict[str, Any], steps: int, ranks: int) -> list[str]:
    """The recipe as --set takes it."""
    node = _node(ranks)
    values = {
        **({} if goal == "sft" else {"objective": goal}), "method": recipe["method"], "max_steps": steps,
        "learning_rate": f"{recipe['learning_rate']:.1e}",  # YAML takes 2e-05 for a text

        **{name: recipe[name] for name in ("warmup_steps", "schedule", "micro_batch", "accumulation", "zero_stage")},
        **({"checkpoint_activations": "true"} if recipe["gradient_checkpointing"] else {}),
        **({"tensor_parallel": recipe["tensor_parallel"]} if recipe["tensor_parallel"] > 1 else {}),
        "ranks": ranks, "nodes": ranks // node, "gpus_per_node": node, "dtype": "bfloat16",
        "checkpoint.every_minutes": recipe["checkpoint_minutes"],
    }  # fmt: skip
    return [f"train.{name}={value}" for name, value in values.items()]


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else f"{value}"
