"""What the launcher makes of the ranks' steps: loss spikes, slow ranks, odd batches, told as events of the job.

Events inform; nothing is stopped or changed. After a resume the spikes go on from the steps in metrics.jsonl, and only
what comes after the checkpoint is told (again); the ranks are new, and so is what is usual for them.

A rank is compared by the time that it computes by itself, without collectives: under ZeRO 3 its forward pass waits for
the others' weights. What it does not do: name a slow rank where there is one.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from refit.states import State
from trainer.alarms import Alarms
from trainer.idle import Idle, stand
from trainer.odd_batches import OddBatches
from trainer.silence import Silent
from trainer.skew import WINDOW_STEPS, Skew, Skewed
from trainer.spikes import Over, Spike, Spikes
from trainer.stragglers import STEPS, Slow, Stragglers, others

HISTORY_STEPS = 300
"""So many steps bring the windows of a new watch, and a spike under way, to where they were."""


LEAST_SECONDS = 0.02
"""So much a step is nobody's slowness: on a busy machine any process is held up for that long."""


class Tell(Protocol):
    """`JobRun.event`."""

    def __call__(self, state: State, reason: str, **more: Any) -> None: ...


class Watch:
    """Watches one launch."""

    def __init__(self, tell: Tell, *, ranks: int, zero_stage: int, history: list[dict[str, Any]]) -> None:
        self._tell, self._ranks = tell, ranks
        self._spikes, self._stragglers = Spikes(), Stragglers(ranks)
        self._zero_stage = zero_stage
        self._odd, self._alarms = OddBatches(), Alarms()
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
        if rank == 0:
            for alarm in self._alarms.see(step, record):
                self._tell(State.RUNNING, str(alarm), alarm=vars(alarm))
        if rank == 0 and not record.get("skipped"):
            self._tell_spike(self._spikes.see(step, record["loss"], record["grad_norm"]))
        if self._ranks == 1 or (self._zero_stage == 3 and "communication" not in record):
            return
        row = self._rows.setdefault(step, {})
        row[rank] = record
        if len(row) == self._ranks:
            del self._rows[step]
            # A save is told with the step after it, whose caches it has left cold.
            saved = any("save" in told for told in row.values())
            computed = noticeable([_compute(row[rank]) for rank in range(self._ranks)])
            self._tell_slow(self._stragglers.see(step, computed, marked=saved))

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

    def idle(self, idle: Idle, log: Path) -> None:
        """Tell that the ranks do nothing, or do something again."""
        host = socket.gethostname()
        reason = (
            "the ranks take steps again" if idle.over
            else f"idle: no step for {idle.seconds:.0f} s, and no rank computes; rank {idle.rank} ({host}) is "
            f"{idle.where}. Its log is {log}; the watchdog ends the launch when it says nothing for long"
        )  # fmt: skip
        self._tell(State.RUNNING, reason, idle=vars(idle), node=host)

    def silent(self, silent: Silent, process: int, log: Path, patience: float) -> None:
        """Tell that a rank says nothing, long before the launch is ended for it, or that it speaks again."""
        host, stood = socket.gethostname(), stand(process)
        where = stood.where if stood else "gone"
        reason = (
            f"rank {silent.rank} ({host}) speaks again, after {silent.seconds:.0f} s" if silent.over
            else f"silent rank {silent.rank} ({host}): nothing for {silent.seconds:.1f} s, where a long step takes "
            f"{silent.step_seconds:.2g} s; it is {where}. Its log is {log}; at {patience:.0f} s the launch is ended"
        )  # fmt: skip
        self._tell(State.RUNNING, reason, silent_rank=vars(silent) | {"host": host, "where": where}, node=host)

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
            self._tell(State.RUNNING, reason, slow_rank=vars(verdict) | {"host": host}, node=host)


def named(packs: list[int], most: int = 8) -> str:
    """Packs by number, the first few of many."""
    rest = f" and {len(packs) - most} more" if len(packs) > most else ""
    return ", ".join(map(str, packs[:most])) + rest


def _nth(number: int) -> str:
    suffix = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number % 100 not in (11, 12, 13) else 0, "th")
    return f"{number}{suffix}"


def _compute(record: dict[str, Any]) -> float:
    """Seconds that a rank computes by itself. Not by the token: padding is computed like anything else.

    Where it is not known how long it was in collectives, the backward pass is left out, at whose end gradients are
    summed over the ranks.
    """
    parts = ("data", "forward", "backward") if "communication" in record else ("data", "forward")
    return float(sum(record[part] for part in parts))


def noticeable(seconds: ArrayLike) -> NDArray[np.float64]:
    """Seconds of each rank, where one that is less than `LEAST_SECONDS` behind the others is as they are."""
    times = np.asarray(seconds, dtype=np.float64)
    usual = others(times)
    return np.where(times - usual < LEAST_SECONDS, np.minimum(times, usual), times)
