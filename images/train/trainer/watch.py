"""What the launcher makes of the ranks' steps: loss spikes, slow ranks, odd batches, told as events of the job.

Events inform; nothing is stopped or changed. After a resume the spikes go on from the steps in metrics.jsonl, and only
what comes after the checkpoint is told (again); the ranks are new, and so is what is usual for them.

What it does not do: name a slow rank under ZeRO 3, whose forward pass waits for the others' weights, or where there is
one rank.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import Any, Protocol

from refit.states import State
from trainer.odd_batches import OddBatches
from trainer.skew import WINDOW_STEPS, Skew, Skewed
from trainer.spikes import Over, Spike, Spikes
from trainer.stragglers import STEPS, Slow, Stragglers

HISTORY_STEPS = 300
"""So many steps bring the windows of a new watch, and a spike under way, to where they were."""


class Tell(Protocol):
    """`JobRun.event`."""

    def __call__(self, state: State, reason: str, **more: Any) -> None: ...


class Watch:
    """Watches one launch."""

    def __init__(self, tell: Tell, *, ranks: int, zero_stage: int, history: list[dict[str, Any]]) -> None:
        self._tell, self._ranks = tell, ranks
        self._spikes, self._stragglers = Spikes(), Stragglers(ranks)
        self._compares = ranks > 1 and zero_stage < 3
        self._odd = OddBatches()
        self._skews = {what: Skew(what) for what in ("tokens", "targets")} if ranks > 1 else {}
        self._rows: dict[int, dict[int, dict[str, Any]]] = {}  # of steps that not all ranks have told yet
        for record in history[-HISTORY_STEPS:]:
            if not record.get("skipped"):
                self._spikes.see(record["step"], record["loss"], record["grad_norm"])
            if "documents" in record:  # not in those that an earlier trainer wrote
                self._odd.see(record)

    def batch(self, batch: dict[str, Any]) -> None:
        """Take in what a step's packs hold, as rank 0 tells it before the step is taken."""
        step, packs = batch["step"], batch["packs"]
        odd = self._odd.see(batch)
        if odd:
            self._tell(
                State.RUNNING,
                f"odd batch at step {step}: {'; '.join(map(str, odd))}. Look at its packs: " + named(packs),
                odd_batch={"step": step, "packs": packs, "odd": [vars(one) for one in odd]},
            )
        for what, skew in self._skews.items():
            verdict = skew.see(step, batch[f"rank_{what}"])
            if verdict is not None:
                self._tell_skew(verdict)

    def step(self, rank: int, record: dict[str, Any]) -> None:
        """Take in a rank's record of a step, as `Loop.step` made it."""
        step = record["step"]
        if rank == 0 and record.get("skipped"):
            self._tell(
                State.RUNNING,
                f"step {step} was skipped, the {_nth(record['skips'])}: {record['why']}. `trainer replay OUTPUT "
                f"--step {step}` takes it again",
                skipped={"step": step, "skips": record["skips"]},
            )
        elif rank == 0:
            self._tell_spike(self._spikes.see(step, record["loss"], record["grad_norm"]))
        if not self._compares:
            return
        row = self._rows.setdefault(step, {})
        row[rank] = record
        if len(row) == self._ranks:
            del self._rows[step]
            # A save is told with the step after it, whose caches it has left cold.
            saved = any("save" in told for told in row.values())
            self._tell_slow(
                self._stragglers.see(step, [_compute(row[rank]) for rank in range(self._ranks)], marked=saved)
            )

    def _tell_spike(self, verdict: Spike | Over | None) -> None:
        if isinstance(verdict, Spike):
            self._tell(
                State.RUNNING,
                f"loss spike at step {verdict.step}: {verdict.loss:.4g}, {verdict.scales:.0f} scales of its noise "
                f"above {verdict.usual:.4g}",
                spike=vars(verdict),
            )
        elif verdict is not None:
            how = "it came down" if verdict.recovered else "it stayed up, and that is the usual loss now"
            self._tell(
                State.RUNNING,
                f"loss spike of step {verdict.began} over at step {verdict.step}: peak {verdict.peak:.4g}, {how}",
                spike_over=vars(verdict),
            )

    def _tell_skew(self, verdict: Skewed) -> None:
        ranks = f"rank {verdict.most} has {verdict.share:.0%} more {verdict.what} than rank {verdict.least}"
        reason = (
            f"data skew over at step {verdict.step}: {ranks}" if verdict.over
            else f"data skew at step {verdict.step}: over {WINDOW_STEPS} steps {ranks}; their places are computed all "
            "the same. Shuffle before packing, or pack more tightly"
        )  # fmt: skip
        self._tell(State.RUNNING, reason, data_skew=vars(verdict))

    def _tell_slow(self, verdicts: Iterable[Slow]) -> None:
        host = socket.gethostname()  # all ranks are this launcher's children
        for verdict in verdicts:
            slow = f"{verdict.times:.1f} times the others for {STEPS} steps"
            reason = (
                f"rank {verdict.rank} ({host}) keeps up again, since step {verdict.step}" if verdict.over
                else f"slow rank {verdict.rank} ({host}) at step {verdict.step}: {slow}"
            )  # fmt: skip
            self._tell(State.RUNNING, reason, slow_rank=vars(verdict) | {"host": host})


def named(packs: list[int], most: int = 8) -> str:
    """Packs by number, the first few of many."""
    rest = f" and {len(packs) - most} more" if len(packs) > most else ""
    return ", ".join(map(str, packs[:most])) + rest


def _nth(number: int) -> str:
    suffix = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number % 100 not in (11, 12, 13) else 0, "th")
    return f"{number}{suffix}"


def _compute(record: dict[str, Any]) -> float:
    """Seconds before the ranks meet. Not by the token: padding is computed like anything else.

    The backward pass is left out, at whose end gradients are summed over the ranks.
    """
    return float(record["data"] + record["forward"])
