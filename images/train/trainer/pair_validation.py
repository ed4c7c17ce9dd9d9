"""The preference loss on pairs that are not learnt from, and how often the chosen answer is the likelier one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed

from trainer import device
from trainer.pairs import to_pairs
from trainer.preference import MEASURES
from trainer.reference import Reference
from trainer.validation import Look, Validator


class PairValidator(Validator):
    """Looks at pairs, each counting whole. `reference` is what the reference model says of them, where it is kept."""

    def __init__(self, *arguments: Any, reference: Reference | None, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._reference = reference

    def _look(self) -> Look:
        names = self._domains.names if self._domains else ()
        total = torch.zeros((1 + len(names), 2 + len(MEASURES)), dtype=torch.float64)  # count, loss, measures
        for packs, is_own in self._turns():
            segments = self._split.segments[packs]
            reference = self._reference.of(packs) if self._reference else None
            batch = to_pairs(self._split.tokens[packs], segments, self._split.mask[packs], reference)
            judged = self._engine.judged(device.put(batch)).cpu()
            self._beat()
            if is_own:
                counted = torch.cat([torch.ones((len(judged), 1), dtype=torch.float64), judged.double()], dim=1)
                total[0] += counted.sum(dim=0)
                if self._domains:
                    total[1:].index_add_(0, self._of_each(packs, segments), counted)
        distributed.all_reduce(total)
        means = total[:, 1:] / total[:, :1]
        known = {name: row for row, name in enumerate(names, start=1) if total[row, 0]}
        measures = {f"validation_{name}": value for name, value in zip(MEASURES, means[0, 1:].tolist(), strict=True)}
        return Look(float(means[0, 0]), {name: float(means[row, 0]) for name, row in known.items()}, measures)

    def _of_each(self, packs: Any, segments: Any) -> Tensor:
        """The domain of each pair: that of its first side."""
        assert self._domains is not None
        of, odd = self._domains.of(packs, segments), segments % 2 == 1
        starts = odd.copy()
        starts[:, 1:] &= segments[:, 1:] != segments[:, :-1]
        return torch.from_numpy(of[starts])
