"""What a dataset means to a plan: how long its packs are, how much of them is learnt from, how many there are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainer.inputs import train_split


@dataclass(frozen=True, kw_only=True)
class Packs:
    """What a pack holds on average, and how many there are (None before the data is prepared)."""

    length: int
    tokens: float
    targets: float
    count: int | None

    @classmethod
    def of(cls, dataset: Path) -> Packs:
        """Those of a prepared dataset."""
        header = train_split(dataset).header
        return cls(
            length=header.length, tokens=header.tokens / header.packs, targets=header.targets / header.packs,
            count=header.packs,
        )  # fmt: skip

    @classmethod
    def assumed(cls, length: int, *, learnt: float = 0.25) -> Packs:
        """Full packs, of which a share (of an instruction set a quarter, of plain text all) is learnt from."""
        return cls(length=length, tokens=length, targets=length * learnt, count=None)
