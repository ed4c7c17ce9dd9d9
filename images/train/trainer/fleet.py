"""The cards that a plan is for, as a person names them on the command line."""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import dataclass
from typing import get_args

from refit.errors import BadInput
from refit.spec import Objective
from trainer.memory import METHODS, Method

Goal = Objective
GOALS: tuple[Goal, ...] = get_args(Objective)

GIB = 1 << 30
KNOWN = {
    "l4": (121e12, 22 * GIB), "a10": (125e12, 22 * GIB), "rtx4090": (165e12, 23 * GIB), "l40s": (362e12, 44 * GIB),
    "a100-40": (312e12, 39 * GIB), "a100": (312e12, 79 * GIB), "h100": (989e12, 79 * GIB), "h200": (989e12, 139 * GIB),
    "b200": (2250e12, 178 * GIB),
}  # fmt: skip
"""Dense bfloat16 FLOP/s (without sparsity) from NVIDIA's data sheets, and the memory that the driver shows."""

DEFAULT = "h100"

UTILISATION = 0.4
"""Share of a card's FLOP/s that training reaches (MFU). torchtitan's Llama 8B on 8 H100: 33 to 39 %; Llama 3 405B: 38
to 43 % (Dubey et al. 2024, table 4)."""

MOST = 100_000
UNITS = {
    "": 1,
    "k": 1e3,
    "m": 1e6,
    "g": 1e9,
    "t": 1e12,
    "p": 1e15,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": GIB,
    "ti": 1 << 40,
}
OPTIONS = ("gpu_memory", "gpu_flops", "mfu", "gpu_price", "goal", "method")


@dataclass(frozen=True, kw_only=True)
class Cards:
    """So many cards of one kind: bytes and dense bfloat16 FLOP/s of each, and what an hour of one costs."""

    count: int
    memory: int
    flops: float
    mfu: float = UTILISATION
    price: float | None = None


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that describe cards and what they are for."""
    group = parser.add_argument_group("cards", "with --gpus the recipe is chosen for them, not taken from SPEC")
    group.add_argument("--gpus", metavar="N", help="how many cards there are")
    group.add_argument("--gpu-memory", metavar="SIZE", help="of each, as 80GiB; default: that of the card named")
    group.add_argument(
        "--gpu-flops", metavar="NAME|FLOPS",
        help=f"dense bfloat16 a second of each, as 989T, or a card: {', '.join(KNOWN)}; default: {DEFAULT}",
    )  # fmt: skip
    group.add_argument("--mfu", metavar="SHARE", help=f"share of that which training reaches; default: {UTILISATION}")
    group.add_argument("--gpu-price", metavar="PRICE", help="what one costs an hour, in any currency")
    group.add_argument("--goal", metavar="GOAL", help=f"{', '.join(GOALS)}; default: train.objective")
    group.add_argument("--method", metavar="METHOD", help="full, lora or qlora; default: full or lora by goal and data")


def cards_of(arguments: argparse.Namespace) -> Cards | None:
    """The cards that the options describe; None without --gpus.

    Raises:
        BadInput: an option makes no sense, or is given without --gpus.
    """
    if arguments.gpus is None:
        stray = next((name for name in OPTIONS if getattr(arguments, name) is not None), None)
        if stray:
            raise BadInput(f"--{stray.replace('_', '-')}: describes cards; say with --gpus N how many there are.")
        return None
    name = (arguments.gpu_flops or DEFAULT).lower()
    flops, memory = KNOWN.get(name) or (
        _size("--gpu-flops", name, "989T or one of " + ", ".join(KNOWN)),
        KNOWN[DEFAULT][1],
    )
    if arguments.gpu_memory is not None:
        memory = int(_size("--gpu-memory", arguments.gpu_memory, "80GiB"))
    if not GIB <= memory <= 10_000 * GIB:
        raise BadInput(f"--gpu-memory {arguments.gpu_memory}: a card has between 1 GiB and 10 TiB; give it as 80GiB.")
    if not 1e9 <= flops <= 1e18:
        raise BadInput(
            f"--gpu-flops {arguments.gpu_flops}: a card does between 1G and 1000P a second; give it as 989T."
        )
    return Cards(
        count=_count(arguments.gpus), memory=memory, flops=flops,
        mfu=UTILISATION if arguments.mfu is None else _number("--mfu", arguments.mfu, most=1.0),
        price=None if arguments.gpu_price is None else _number("--gpu-price", arguments.gpu_price, most=1e9),
    )  # fmt: skip


def goal_of(arguments: argparse.Namespace, default: Goal = "sft") -> Goal:
    """What the training is for: as an option says, else the spec's objective."""
    for goal in GOALS:
        if (arguments.goal or default) == goal:
            return goal
    raise BadInput(f"--goal {arguments.goal}: expected one of {', '.join(GOALS)}.")


def method_of(arguments: argparse.Namespace) -> Method | None:
    """The method that was asked for; None where it is to be chosen."""
    if arguments.method is None:
        return None
    for method in METHODS:
        if arguments.method == method:
            return method
    raise BadInput(f"--method {arguments.method}: expected one of {', '.join(METHODS)}.")


def _count(text: str) -> int:
    if not re.fullmatch(r"\d{1,7}", text, re.ASCII) or not 1 <= int(text) <= MOST:
        raise BadInput(f"--gpus {text}: expected a whole number from 1 to {MOST:,}.")
    return int(text)


def _number(option: str, text: str, *, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= most:
        raise BadInput(f"{option} {text}: expected a number above 0 and at most {most:g}.")
    return value


def _size(option: str, text: str, example: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*([kmgtp]i?|)b?", text.strip(), re.IGNORECASE | re.ASCII)
    if not found or found[2].lower() not in UNITS:
        raise BadInput(f"{option} {text}: expected a size, as {example}.")
    return float(found[1]) * UNITS[found[2].lower()]
