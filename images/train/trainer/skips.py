"""Steps that were passed over because they were not finite: how many were, and whether one more may be.

A pure function of the steps, so a resume that is told what was spent up to its checkpoint decides as the run before.
"""

from __future__ import annotations

from collections.abc import Iterable

from refit.spec import Skip


class Skips:
    """What is left of a training's budget; `steps` are those that were passed over, from 1, in order."""

    def __init__(self, settings: Skip, steps: Iterable[int] = ()) -> None:
        self._settings = settings
        self.steps = list(steps)

    def spend(self, step: int) -> bool:
        """Pass over one more; False, and nothing is spent, where the budget does not allow it."""
        row = 0
        while row < len(self.steps) and self.steps[-1 - row] == step - 1 - row:
            row += 1
        if len(self.steps) >= self._settings.budget or row >= self._settings.in_a_row:
            return False
        self.steps.append(step)
        return True

    @property
    def told(self) -> str:
        """What the budget was, for who reads why a training ended."""
        if self._settings.budget == 0:
            return ""
        return (
            f" {len(self.steps)} steps were skipped before it; train.skip allows {self._settings.budget} in all and "
            f"{self._settings.in_a_row} in a row."
        )
