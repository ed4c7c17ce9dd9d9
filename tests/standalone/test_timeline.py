"""Where the time went: overlapping work counts once, and waiting counts as orchestration."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from standalone.demo.timeline import Interval, covered, job_work, overhead, rollout_work, stage_seconds

spans = st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100)).map(lambda pair: Interval(min(pair), max(pair))))


@given(spans)
def test_covered_counts_each_second_once(intervals: list[Interval]) -> None:
    ticks = {second for span in intervals for second in range(int(span.start), int(span.end))}
    assert covered(intervals, Interval(0, 100)) == len(ticks)


def test_overhead_is_what_no_work_covers() -> None:
    assert overhead([Interval(0, 40), Interval(30, 60), Interval(90, 200)], Interval(0, 100)) == pytest.approx(0.3)
    assert overhead([], Interval(5, 5)) == 0


def test_a_job_works_from_running_to_its_end_in_each_attempt() -> None:
    def event(second: int, state: str) -> dict[str, str]:
        return {"at": f"2026-01-01T00:00:{second:02}+00:00", "state": state}

    found = job_work([event(1, "running"), event(5, "suspended"), event(7, "running"), event(9, "succeeded")])
    assert [span.end - span.start for span in found] == [4, 2]


def test_a_rollout_measures_from_entry_to_verdict() -> None:
    journal = [
        {"at": 0.0, "action": "entering", "verdict": None},
        {"at": 3.0, "action": "judged", "verdict": "wait"},
        {"at": 8.0, "action": "judged", "verdict": "pass"},
        {"at": 20.0, "action": "entering", "verdict": None},
        {"at": 21.0, "action": "rolled_back", "verdict": "fail"},
    ]
    assert rollout_work(journal) == [Interval(0.0, 8.0), Interval(20.0, 21.0)]


def test_a_stage_lasts_from_its_first_task_to_its_last_and_skipped_ones_do_not_count() -> None:
    def task(name: str, state: str, start: int, end: int) -> dict[str, str]:
        day = "2026-01-01T00:00:"
        return {"task_id": name, "state": state, "start_date": f"{day}{start:02}Z", "end_date": f"{day}{end:02}Z"}

    tasks = [
        task("train.plan", "success", 0, 2),
        task("train.train", "success", 5, 15),
        task("roll_out.start", "skipped", 5, 15),
        {"task_id": "check", "state": "success", "start_date": None, "end_date": None},
    ]
    assert stage_seconds(tasks) == {"train": 15.0}
