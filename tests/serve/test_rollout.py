"""The rollout's state machine: whatever is asked of it, in whatever order, people are safe."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from refit.release import Release
from refit.spec import Rollout as Policy
from refit.spec import Serve
from serving.rollout import Action, Entry, Plan, Refused, Rollout, State, apply, replay
from serving.verdicts import Verdict

STEPS = (0, 5, 20, 100)


def a_release(letter: str) -> Release:
    return Release(
        id=letter * 16, pipeline="tiny", digest=letter, model="file:///m", profile=Serve(), team="t", owner="o"
    )


PLAN = Plan(id="r", pipeline="tiny", candidate=a_release("b"), champion=a_release("a"), steps=STEPS, policy=Policy())


class Machine(RuleBasedStateMachine):
    """A controller that does what it may and tries what it may not."""

    def __init__(self) -> None:
        super().__init__()
        self.rollout = Rollout(PLAN)
        self.journal: list[Entry] = []
        self.highest_passed = -1
        self.clock = 0.0
        self.write(Action.STARTED)
        self.write(Action.ENTERING, step=0)

    def write(self, action: Action, **more: Any) -> None:
        self.clock += 1
        entry = self.rollout.entry(action, self.clock, f"{action}", **more)
        self.journal.append(entry)
        self.rollout = apply(self.rollout, entry)

    @precondition(lambda self: self.rollout.running and self.rollout.entered_at is None)
    @rule()
    def the_route_is_read_back(self) -> None:
        self.write(Action.ENTERED)

    @precondition(lambda self: self.rollout.running and self.rollout.entered_at is not None and not self.rollout.passed)
    @rule(verdict=st.sampled_from([Verdict.WAIT, Verdict.PASS]))
    def a_verdict(self, verdict: Verdict) -> None:
        self.write(Action.JUDGED, verdict=verdict)
        if verdict is Verdict.PASS:
            self.highest_passed = self.rollout.step

    @rule(step=st.integers(-1, len(STEPS)))
    def somebody_asks_for_a_step(self, step: int) -> None:
        before = self.rollout
        try:
            if before.may_enter(step):
                assert (step, before.passed, before.running) == (before.step + 1, True, True)
                self.write(Action.ENTERING, step=step)
        except Refused:
            assert self.rollout == before

    @rule()
    def somebody_asks_to_finish(self) -> None:
        try:
            if self.rollout.may_finish():
                assert self.highest_passed == len(STEPS) - 1
                self.write(Action.FINISHING)
                self.write(Action.FINISHED)
        except Refused:
            pass

    @precondition(lambda self: self.rollout.running)
    @rule()
    def harm(self) -> None:
        self.write(Action.ROLLED_BACK, verdict=Verdict.FAIL)

    @invariant()
    def no_user_sees_a_model_that_was_taken_back(self) -> None:
        if not self.rollout.running:
            assert self.rollout.weight == 0

    @invariant()
    def no_share_without_a_pass_of_the_step_before(self) -> None:
        assert self.rollout.weight <= STEPS[min(self.highest_passed + 1, len(STEPS) - 1)]
        assert self.rollout.step <= self.highest_passed + 1

    @invariant()
    def the_journal_tells_all(self) -> None:
        assert replay(PLAN, self.journal) == self.rollout
        assert replay(PLAN, [entry for entry in self.journal for _ in (0, 1)]) == self.rollout
        assert [Entry.model_validate_json(entry.model_dump_json()) for entry in self.journal] == self.journal


TestMachine = Machine.TestCase


def test_a_step_that_was_entered_before_is_no_change() -> None:
    rollout = replace(Rollout(PLAN), step=2, verdict=Verdict.PASS)
    assert [rollout.may_enter(step) for step in (0, 1, 2, 3)] == [False, False, False, True]
    with pytest.raises(Refused, match="step 3 is not next"):
        replace(rollout, step=1).may_enter(3)


def test_a_new_step_begins_without_the_old_ones_pass() -> None:
    rollout = replace(Rollout(PLAN), verdict=Verdict.PASS, entered_at=1.0)
    entered = apply(rollout, rollout.entry(Action.ENTERING, 2.0, "5 %", step=1))
    assert (entered.passed, entered.entered_at, entered.weight) == (False, None, 0)
    live = apply(entered, entered.entry(Action.ENTERED, 3.0))
    assert (live.weight, live.entered_at) == (5, 3.0)


def test_a_journal_with_a_hole_is_not_believed() -> None:
    rollout = Rollout(PLAN)
    entry = rollout.entry(Action.STARTED, 1.0).model_copy(update={"sequence": 2})
    with pytest.raises(ValueError, match="entry 2 of rollout r follows 0"):
        apply(rollout, entry)


def test_nothing_follows_the_end() -> None:
    rollout = apply(Rollout(PLAN), Rollout(PLAN).entry(Action.ROLLED_BACK, 1.0, "harm"))
    assert (rollout.state, rollout.verdict, rollout.why) == (State.ROLLED_BACK, Verdict.FAIL, "harm")
    with pytest.raises(ValueError, match="nothing can follow"):
        apply(rollout, rollout.entry(Action.ENTERED, 2.0))


@pytest.mark.parametrize("steps", [(5, 100), (0, 50, 20, 100), (0, 5), (0,), (), (0, 100, 100)])
def test_steps_rise_from_shadow_to_everybody(steps: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"must rise from 0 \(shadow\) to 100"):
        Plan.model_validate({**PLAN.model_dump(), "steps": steps})


@pytest.mark.parametrize("name", ["../evil", "", "a b", ".hidden", "a\\1"])
def test_a_rollouts_name_is_a_folders_name(name: str) -> None:
    with pytest.raises(ValueError, match="id"):
        Plan.model_validate({**PLAN.model_dump(), "id": name})
