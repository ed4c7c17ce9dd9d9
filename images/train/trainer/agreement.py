"""What the ranks agree on before every optimizer step, in one all-reduce: the loss, whether it is finite, whether to
stop, how it stands with saving. So they stop, save and give up at the same step, and a NaN on any of them moves
nobody's weights.

It is begun before the step's last way back and heard after it: nobody waits for it then, whatever a message takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, distributed

from refit.errors import Infrastructure


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """Of all ranks: the summed loss, whether all of them are finite, whether anybody is to stop, how long the last step
    took, the sums of the votes about saving and of what their objectives told beside the loss."""

    nll: float
    finite: bool
    stop: bool
    seconds: float
    saving: list[float]
    told: dict[str, float]


def anybody(flag: bool) -> bool:
    """Whether it is so on any rank; all ranks together."""
    found = torch.tensor([flag], dtype=torch.float64)
    distributed.all_reduce(found)
    return bool(found > 0)


class Agreement:
    """An agreement under way, of one rank; the same ones, in the same order, on every rank.

    Args:
        number: of the step, from 0.
        nll: this rank's part of the summed loss.
        counts: whether that is added up; whether it is finite is said anyway.
        stop: whether this rank is to stop.
        seconds: how long its last step took.
        saving: its votes about saving.
        told: what its objective tells beside the loss.
    """

    def __init__(
        self, number: int, nll: float, *, counts: bool, stop: bool, seconds: float, saving: Sequence[float],
        told: dict[str, float],
    ) -> None:  # fmt: skip
        self._number, self._names, self._saving = number, list(told), len(saving)
        own = [number, nll if counts else 0.0, not math.isfinite(nll), stop, seconds, *saving, *told.values()]
        self._votes: Tensor = torch.tensor(own, dtype=torch.float64)
        self._work = distributed.all_reduce(self._votes, async_op=True)

    def heard(self) -> Agreed:
        """Wait for the others.

        Raises:
            Infrastructure: they are not all at the same step.
        """
        self._work.wait()
        numbers, nll, bad, stop, seconds, *more = self._votes.tolist()
        ranks = distributed.get_world_size()
        if numbers != self._number * ranks:  # or numbers of another step would be in this one
            raise Infrastructure(
                f"the ranks are not all at step {self._number + 1}: a collective was entered by some of them"
            )
        saving, told = more[: self._saving], more[self._saving :]
        return Agreed(
            nll=nll, finite=bad == 0, stop=stop > 0, seconds=seconds / ranks, saving=saving,
            told=dict(zip(self._names, told, strict=True)),
        )  # fmt: skip
