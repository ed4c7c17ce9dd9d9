"""Where a step's time goes is measured, and said when too much of it is lost; ranks that do nothing are named."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import House
from test_watch import LEARNT, Told, record, run

from trainer.alarms import SETTLE_STEPS, WINDOW_STEPS, Alarms
from trainer.collectives import Clock
from trainer.gpus import Meter
from trainer.idle import IDLE_SECONDS, Idleness, Stood, stand
from trainer.stragglers import STEPS
from trainer.watch import LEAST_SECONDS, Watch

USUAL = {"seconds": 1.0, "data": 0.01, "communication": 0.05, "wait": 0.01}


def raised(alarms: Alarms, steps: range, **more: float) -> list[tuple[str, int, bool]]:
    told = [alarm for step in steps for alarm in alarms.see(step, USUAL | more)]
    return [(alarm.name, alarm.step, alarm.over) for alarm in told]


@pytest.mark.parametrize(
    ("name", "lost"),
    [("communication", {"communication": 0.22}), ("data", {"data": 0.07}), ("utilisation", {"utilisation": 0.75})],
)
def test_an_alarm_is_raised_once_and_once_it_is_over(name: str, lost: dict[str, float]) -> None:
    alarms, well = Alarms(), {"utilisation": 0.95}
    assert raised(alarms, range(1, 201), **well) == []
    (began,) = raised(alarms, range(201, 401), **(well | lost))
    (over,) = raised(alarms, range(401, 601), **well)
    assert (began[0], began[2], over[0], over[2]) == (name, False, name, True)
    assert 201 < began[1] <= 200 + WINDOW_STEPS


def test_what_is_lost_in_small_change_or_at_the_start_is_no_alarm() -> None:
    alarms = Alarms()
    tiny = {name: seconds / 100 for name, seconds in (USUAL | {"communication": 0.5}).items()}
    assert raised(alarms, range(1, 300), **tiny) == [], "5 ms a step"
    alarms = Alarms()
    assert raised(alarms, range(SETTLE_STEPS), data=30.0) == []
    assert raised(alarms, range(SETTLE_STEPS, 200)) == []


def test_an_alarm_says_what_to_try() -> None:
    told = Told()
    watch = Watch(told, ranks=1, zero_stage=0, history=[])
    for step in range(1, 100):
        watch.step(0, {"step": step, "loss": 2.0, "grad_norm": 1.0, **USUAL, "data": 0.25})
    (event,) = told
    assert event["reason"].startswith("25% of the time ranks wait for data (step 60; up to 5% is usual). Try: put the")


def parts(step: int, forward: float, communication: float) -> dict[str, Any]:
    return record(step, forward=forward, backward=1.0, communication=communication)


def test_under_zero_3_a_slow_rank_is_named_by_the_time_it_computes_alone() -> None:
    told = Told()
    watch = Watch(told, ranks=2, zero_stage=3, history=[])
    for step in range(1, LEARNT + STEPS + 1):
        slow = step > LEARNT
        watch.step(0, parts(step, 1.0, 4.0 if slow else 0.1))
        watch.step(1, parts(step, 4.0 if slow else 1.0, 0.1))
    assert [event["slow_rank"]["rank"] for event in told] == [1]


def test_a_few_milliseconds_are_nobodys_slowness() -> None:
    """Steps of 10 ms on a busy machine: any process is held up for that long."""
    told = Told()
    watch = Watch(told, ranks=2, zero_stage=0, history=[])
    for step in range(1, LEARNT + 50):
        late = 0.9 * LEAST_SECONDS if step > LEARNT else 0.0
        for rank in range(2):
            watch.step(rank, {**record(step, forward=0.01 + rank * late), "data": 0.0})
    assert told == []
    watch = Watch(told, ranks=2, zero_stage=0, history=[])
    run(watch, range(1, LEARNT + 1))
    run(watch, range(LEARNT + 1, LEARNT + STEPS + 1), slow=2.5)
    assert len(told) == 1


def test_a_collective_in_a_collective_counts_once_and_so_does_waiting() -> None:
    clock = Clock()
    inner = clock.timed(lambda: time.sleep(0.02))
    began = time.perf_counter()
    inner()
    assert clock.heard() == [], "nobody listened"
    clock.listen()
    clock.timed(lambda: (inner(), inner()))()
    ((begin, end),) = clock.heard()
    assert 0.04 <= end - begin <= time.perf_counter() - began
    inner()
    assert clock.heard() == [], "nor does anybody now"


class Ranks:
    """Processes as the kernel tells of them, at will."""

    def __init__(self, *states: str) -> None:
        self.states, self.used = list(states), [0.0] * len(states)

    def look(self, process: int) -> Stood:
        return Stood(self.used[process], self.states[process], "futex_wait" if self.states[process] == "S" else "0")


def test_ranks_that_do_nothing_are_told_once_with_the_one_to_look_at() -> None:
    ranks = Ranks("S", "D")
    idleness = Idleness(ranks.look)
    told = [idleness.see(float(now), [0, 1]) for now in range(10, 300)]
    (idle,) = [one for one in told if one is not None]
    assert (idle.rank, idle.where) == (1, "waiting for a disk")
    assert idle.seconds >= IDLE_SECONDS
    over = idleness.stepped()
    assert over is not None
    assert over.over
    assert idleness.stepped() is None


def test_ranks_that_compute_or_step_or_have_ended_are_not_idle() -> None:
    ranks = Ranks("S", "R")
    busy = Idleness(ranks.look)
    for now in range(10, 400):
        ranks.used[1] += 0.5
        assert busy.see(float(now), [0, 1]) is None, "a long step"
    stepping = Idleness(Ranks("S", "S").look)
    for now in range(10, 400):
        assert stepping.see(float(now), [0, 1]) is None
        if now % 50 == 0:
            stepping.stepped()
    gone = Idleness(lambda process: None)
    assert not any(gone.see(float(now), [0]) for now in range(10, 400))


def test_a_stopped_process_is_seen_to_be_held() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        stood = stand(process.pid)
        assert stood is not None
        assert stood.where.startswith("held by a signal")
    finally:
        process.kill()
        process.wait()
    assert stand(process.pid) is None


def test_an_idle_event_names_node_and_log() -> None:
    told, idleness = Told(), Idleness(Ranks("S", "T").look)
    idle = next(one for now in range(10, 300) if (one := idleness.see(float(now), [0, 1])) is not None)
    Watch(told, ranks=2, zero_stage=0, history=[]).idle(idle, Path("ranks/rank-1.log"))
    assert "rank 1" in told[0]["reason"]
    assert "held by a signal. Its log is ranks/rank-1.log" in told[0]["reason"]
    assert told[0]["node"]


class Nvml:
    """NVML as it answers for one card; power is not supported by it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(type(self), f"_{name}", lambda *_: 0)

    @staticmethod
    def _nvmlDeviceGetCount_v2(count: Any) -> int:
        count._obj.value = 1
        return 0

    @staticmethod
    def _nvmlDeviceGetUtilizationRates(_card: Any, rates: Any) -> int:
        rates._obj.gpu = 83
        return 0

    @staticmethod
    def _nvmlDeviceGetTemperature(_card: Any, _sensor: int, heat: Any) -> int:
        heat._obj.value = 61
        return 0

    @staticmethod
    def _nvmlDeviceGetPowerUsage(_card: Any, _power: Any) -> int:
        return 3

    @staticmethod
    def _nvmlDeviceGetMemoryInfo(_card: Any, memory: Any) -> int:
        memory._obj.used = 5 << 30
        return 0


def test_a_card_tells_what_it_can() -> None:
    meter = Meter.of(0, Nvml())
    assert meter is not None
    assert meter.read() == {"utilisation": 0.83, "temperature": 61.0, "device_memory": float(5 << 30)}
    assert ctypes.sizeof(ctypes.c_uint) == 4
    if not Path("/proc/driver/nvidia").exists():
        assert Meter.of(0) is None


@pytest.mark.integration
@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_is_split_and_its_parts_are_not_more_than_it(house: House, stage: int) -> None:
    name = f"split-{stage}"
    house.train(name, ranks=2, sets=(f"train.zero_stage={stage}", "train.max_steps=6", "train.peak_flops=1e12",
                                     "train.validation.every_steps=3"))  # fmt: skip
    for row in house.metrics(name):
        inside = [row[part] for part in ("data", "forward", "backward", "communication", "wait", "optimizer")]
        assert min(inside) >= 0
        assert row["communication"] > 0
        assert sum(inside) <= row["seconds"]
        assert 0 < row["mfu"] < 1
        assert row["resident"] > 100 << 20
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])
        assert row["documents"] > 0
        assert sum(row["domains"].values()) == pytest.approx(1)
