"""The loss on data that is not learnt from: how good the model is by it, which checkpoint is the best, when to stop.

Every target counts whole, whatever it weighs in training: the model is judged here, not the data. Nothing random is
drawn, so a training with looks and one without take the very same steps.

What it does not do: decide whether a model is good enough (the exam and the gate do).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed
from torch.nn import functional

from refit.domains import Domains
from refit.errors import Diverged
from refit.packed import Packed
from refit.spec import Validation
from trainer import device
from trainer.agreement import anybody
from trainer.batches import to_batch
from trainer.engines import Engine
from trainer.tensor_parallel import share


@dataclass(frozen=True)
class Best:
    """The lowest loss so far: after which step, and how many looks there have been since without a lower one."""

    step: int
    loss: float
    since: int = 0

    def after(self, step: int, loss: float) -> Best:
        """What is the best once a loss more is known."""
        return Best(step, loss) if loss < self.loss else Best(self.step, self.loss, self.since + 1)

    def as_dict(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Look:
    """The mean loss over all targets of the split, and over those of each domain that has any; what else was measured,
    by its name in the step's record."""

    loss: float
    domains: dict[str, float]
    measures: dict[str, float] = field(default_factory=dict)


class GivenUp(Exception):
    """A look was not finished, for a rank was told to stop."""


class Validator:
    """Looks at the validation split now and then; all ranks look together, and all see the same."""

    def __init__(
        self, engine: Engine, split: Packed, domains: Domains | None, settings: Validation, *, micro_batch: int,
        best: Best | None, beat: Callable[[], None] = lambda: None, group: int = 1,
        stopping: Callable[[], float] = lambda: 0.0,
    ) -> None:  # fmt: skip
        self._engine, self._split, self._domains, self._settings = engine, split, domains, settings
        self._micro_batch, self._beat, self._group = micro_batch, beat, group
        self._stopping, self._to_the_end = stopping, True
        self.best = best
        self._former: list[Best] = []  # the lowest before the lowest, oldest first

    def is_due(self, step: int, last: int) -> bool:
        """Whether to look after `step` finished steps; after the last one always."""
        every = self._settings.every_steps
        return every is not None and (step % every == 0 or step == last)

    @property
    def is_enough(self) -> bool:
        """Whether there is no use in going on."""
        patience = self._settings.patience
        return patience is not None and self.best is not None and self.best.since >= patience

    def look(self, step: int, *, to_the_end: bool = True) -> Look:
        """The loss after `step` finished steps.

        Raises:
            Diverged: it is not finite.
            GivenUp: a rank was told to stop, and it need not be `to_the_end`: a look may take longer than there is.
        """
        self._to_the_end = to_the_end
        found = self._look()
        loss = found.loss
        if not math.isfinite(loss):
            raise Diverged(f"after step {step} the loss on the validation split is {loss}; lower train.learning_rate.")
        before, self.best = self.best, self.best.after(step, loss) if self.best else Best(step, loss)
        if self.best.step != step:
            self._former = [replace(one, since=one.since + 1) for one in self._former]
        elif before is not None:
            self._former.append(before)
        return found

    def forget(self, step: int) -> None:
        """A step could not be saved: where it was the best, the one before it is again, as if nobody had looked."""
        kept = [one for one in (*self._former, self.best) if one is not None and one.step != step]
        self.best = kept[-1] if kept else None
        self._former = kept[:-1]

    def _look(self) -> Look:
        names = self._domains.names if self._domains else ()
        total = torch.zeros((1 + len(names), 2), dtype=torch.float64)
        for packs, is_own in self._turns():
            segments = self._split.segments[packs]
            batch = to_batch(self._split.tokens[packs], segments, self._split.mask[packs])
            here = device.put(batch)
            losses = functional.cross_entropy(self._engine.logits(here), here.labels, reduction="none").double().cpu()
            self._beat()
            if is_own:
                total[0] += torch.stack([losses.sum(), torch.tensor(float(len(losses)))])
            if is_own and self._domains:
                of = torch.from_numpy(self._domains.of(packs, segments)[:, 1:])[batch.select[:, :-1]]
                total[1:, 0].index_add_(0, of, losses)
                total[1:, 1].index_add_(0, of, torch.ones_like(losses))
        distributed.all_reduce(total)
        means = (total[:, 0] / total[:, 1]).tolist()
        known = [name for name, count in zip(names, total[1:, 1].tolist(), strict=True) if count]
        return Look(means[0], {name: means[1 + names.index(name)] for name in known})

    def _turns(self) -> Iterator[tuple[NDArray[np.int64], bool]]:
        """This rank's share; before each batch all ranks hear whether any of them is to stop."""
        for each in self._share():
            if not self._to_the_end and anybody(self._stopping() > 0):
                raise GivenUp
            yield each

    def _share(self) -> list[tuple[NDArray[np.int64], bool]]:
        """This rank's batches of packs, which are those of its tensor-parallel group. All ranks have as many, since
        with ZeRO 3 a forward pass is everybody's: who has too few takes the first one again, and does not count it.
        """
        packs = np.arange(self._split.header.packs)
        batches = [packs[at : at + self._micro_batch] for at in range(0, len(packs), self._micro_batch)]
        rank, ranks = share(distributed.get_rank(), distributed.get_world_size(), self._group)
        turns = -(-len(batches) // ranks)
        own = [rank + turn * ranks for turn in range(turns)]
        return [(batches[at], True) if at < len(batches) else (batches[0], False) for at in own]
