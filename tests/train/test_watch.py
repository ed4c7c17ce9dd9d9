"""What the launcher tells of the ranks' steps."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any, cast

from refit.job import JobRun
from refit.spec import Train
from refit.states import State
from trainer.inputs import Inputs
from trainer.launcher import Launcher
from trainer.ranks import Ranks
from trainer.stragglers import BASELINE_STEPS, SETTLE_STEPS, STEPS
from trainer.watch import Watch


class Told(list[dict[str, Any]]):
    """Stands where `JobRun.event` does."""

    def __call__(self, state: State, reason: str, **more: Any) -> None:
        assert state is State.RUNNING
        self.append({"reason": reason, **more})


def record(step: int, loss: float = 2.0, forward: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": loss, "grad_norm": 1.0, "data": 0.01, "forward": forward, **more}


def run(watch: Watch, steps: range, slow: float = 1.0, ranks: int = 2, **more: Any) -> None:
    for step in steps:
        for rank in range(ranks):
            watch.step(rank, record(step, forward=slow if rank == 1 else 1.0, **more))


LEARNT = SETTLE_STEPS + BASELINE_STEPS


def test_a_spike_and_its_end_are_events_told_by_rank_0_alone() -> None:
    told = Told()
    watch = Watch(told, ranks=2, zero_stage=0, history=[])
    for step in range(1, 120):
        for rank in range(2):
            watch.step(rank, record(step, loss=5.0 if 80 <= step < 90 else 2.0))
    began, over = told
    assert began["reason"] == "loss spike at step 82: 5, 182 scales of its noise above 2"
    assert began["spike"]["began"] == 80
    assert over["spike_over"]["recovered"]


def test_after_a_resume_a_spike_is_not_told_twice() -> None:
    history = [record(step, loss=5.0 if step >= 80 else 2.0) for step in range(1, 85)]
    told = Told()
    watch = Watch(told, ranks=1, zero_stage=0, history=history)
    for step in range(85, 95):
        watch.step(0, record(step, loss=5.0 if step < 88 else 2.0))
    assert [list(event)[1] for event in told] == ["spike_over"]


def test_a_slow_rank_is_named_with_its_host() -> None:
    told = Told()
    watch = Watch(told, ranks=2, zero_stage=1, history=[])
    run(watch, range(1, LEARNT + 1))
    run(watch, range(LEARNT + 1, LEARNT + STEPS + 1), slow=2.5)
    (event,) = told
    assert event["slow_rank"] == {
        "rank": 1, "step": LEARNT + STEPS, "times": event["slow_rank"]["times"], "over": False,
        "host": socket.gethostname(),
    }  # fmt: skip
    assert event["reason"] == (
        f"slow rank 1 ({socket.gethostname()}) at step {LEARNT + STEPS}: 2.5 times the others for {STEPS} steps"
    )
    assert " on " not in event["reason"], "the projection reads a host after it"


def test_a_step_after_a_save_under_zero_3_or_of_one_rank_is_not_compared() -> None:
    told = Told()
    for zero_stage, ranks, more in ((0, 2, {"save": 1.0}), (3, 2, {}), (0, 1, {})):
        watch = Watch(told, ranks=ranks, zero_stage=zero_stage, history=[])
        run(watch, range(1, LEARNT + 1), ranks=ranks)
        run(watch, range(LEARNT + 1, LEARNT + 50), slow=4.0, ranks=ranks, **more)
    assert told == []


def test_the_launcher_hears_the_steps_of_all_ranks() -> None:
    told = Told()
    spec = SimpleNamespace(train=Train(base="cache://models/x", ranks=2, accumulation=2))
    launcher = Launcher(
        cast(JobRun, SimpleNamespace(spec=spec)), cast(Inputs, None), mode="train", dtype="float32", token=""
    )
    launcher._watch = Watch(told, ranks=2, zero_stage=0, history=[])
    said = [
        (
            SimpleNamespace(number=rank),
            {"kind": "step", "at": 0.0, "tokens": 8, "seconds": 9.0, **record(step, 2.0, slow)},
        )
        for step in range(1, LEARNT + STEPS + 1)
        for rank, slow in enumerate((1.0, 3.0 if step > LEARNT else 1.0))
    ]
    launcher._listen(cast(Ranks, SimpleNamespace(messages=lambda _timeout: said)), 0)
    assert [event["slow_rank"]["rank"] for event in told] == [1]
    assert launcher.last["step"] == LEARNT + STEPS
