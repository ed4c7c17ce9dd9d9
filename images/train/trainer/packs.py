"""What a dataset means to a plan: how long its packs are, how much of them is learnt from, how many there are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from refit.spec import Objective, Train
from trainer.inputs import train_split


@dataclass(frozen=True, kw_only=True)
class Packs:
    """What a pack holds on average, and how many there are (None before the data is prepared)."""

    length: int
    tokens: float
    targets: float
    count: int | None

    @classmethod
    def of(cls, dataset: Path, train: Train) -> Packs:
        """Those of a dataset that was prepared for a training."""
        header = train_split(dataset, train).header
        return cls(
            length=header.length, tokens=header.tokens / header.packs, targets=header.targets / header.packs,
            count=header.packs,
        )  # fmt: skip

    @classmethod
    def assumed(cls, length: int, *, learnt: float = 0.25) -> Packs:
        """Full packs, of which a share (of an instruction set a quarter, of plain text all) is learnt from."""
        return cls(length=length, tokens=length, targets=length * learnt, count=None)


def learnt(objective: Objective) -> float:
    """The share of tokens that is taken to be learnt before there is data."""
    return 1.0 if objective == "pretrain" else 0.25


def reference_tokens(objective: Objective, method: str, *, tokens: float, once: float) -> float:
    """How many tokens DPO's reference model reads: with adapters, which are then off, all `tokens` of a training; in a
    full one each of the data `once`, and its answers are kept."""
    if objective != "dpo":
        return 0.0
    return min(tokens, once) if method == "full" else tokens
