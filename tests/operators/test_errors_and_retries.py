"""Kinds of failure: what is tried again, how often, and how they pass through a trigger's event."""

from __future__ import annotations

from typing import Any

import pytest
from airflow.sdk.definitions.retry_policy import RetryAction

from operators import errors as ours
from operators.outcome import FINISH, GATE, Outcome, decide
from operators.retries import FAILURES, ByKind
from refit import errors


class Kept(dict[str, Any]):
    """The task's own store."""

    set = dict.__setitem__


def decisions(*failures: BaseException) -> list[RetryAction]:
    """What the policy says of one failure after the other, in one task."""
    context: Any = {"task_state_store": Kept()}
    return [ByKind().evaluate(error, number, 50, context).action for number, error in enumerate(failures, 1)]


@pytest.mark.parametrize("kind", [errors.BadSpec, errors.BadRecords, errors.PreflightRefused, errors.Diverged,
                                  errors.GateRefused, ours.RolledBack, ours.TimedOut, ours.Cancelled])  # fmt: skip
def test_what_a_person_must_change_is_never_tried_again(kind: type[Exception]) -> None:
    assert decisions(kind("x")) == [RetryAction.FAIL]


def test_what_broke_under_a_job_is_tried_a_few_times() -> None:
    broken = [errors.NodeLost("x")] * (FAILURES + 1)
    assert decisions(*broken) == [RetryAction.RETRY] * FAILURES + [RetryAction.FAIL]


def test_preemptions_do_not_use_up_the_tries_of_other_failures() -> None:
    told = [*[errors.Preempted("x")] * 10, *[errors.NodeLost("x")] * FAILURES, errors.Preempted("x")]
    assert decisions(*told) == [RetryAction.RETRY] * len(told)


def test_every_error_of_the_tree_survives_a_trigger_s_event() -> None:
    for kind in (errors.BadRecords, errors.Diverged, errors.Preempted, errors.NodeLost, ours.Evicted, ours.OutOfMemory):
        restored = ours.restore(ours.describe(kind("why")))
        assert type(restored) is kind
        assert str(restored) == "why"
    assert type(ours.restore({"error": "Unheard", "message": "x"})) is errors.Infrastructure


@pytest.mark.parametrize(
    ("states", "known", "outcome"),
    [
        ({FINISH: "success"}, {"rollout": {"state": "finished"}}, Outcome.PROMOTED),
        ({FINISH: "skipped", GATE: "skipped"}, {"same": True}, Outcome.ALREADY_CHAMPION),
        ({GATE: "failed"}, {"verdict": {"verdict": "hold", "why": "12 items"}}, Outcome.STOPPED_AT_GATE),
        ({"roll_out.step_2": "failed"}, {"rollout": {"state": "rolled_back", "why": "harm"}}, Outcome.ROLLED_BACK),
        ({"promote.approve": "success", "promote.register": "skipped"}, {}, Outcome.STOPPED_AT_GATE),
        ({"train.train": "failed", FINISH: "upstream_failed"}, {}, Outcome.FAILED),
        ({"train.train": "failed"}, {"same": True}, Outcome.FAILED),
        ({"train.train": "failed"}, {"faults": {"train.train": "stopped early: worse"}}, Outcome.STOPPED_AT_GATE),
        ({"train.train": "skipped"}, {}, Outcome.FAILED),
        ({GATE: "failed"}, {"verdict": {"verdict": "pass"}}, Outcome.FAILED),
    ],
)
def test_the_outcome_follows_from_what_is_written(
    states: dict[str, str], known: dict[str, Any], outcome: Outcome
) -> None:
    given: dict[str, Any] = {"same": False, "verdict": {}, "rollout": {}, "faults": {}, **known}
    assert decide(states, **given)[0] is outcome


def test_a_failed_run_says_what_its_task_died_of() -> None:
    faults = {"train.train": "loss is NaN at step 7", "first_champion.train": "an old one"}
    _, why = decide({"train.train": "failed"}, same=False, verdict={}, rollout={}, faults=faults)
    assert why == "train.train: loss is NaN at step 7"
