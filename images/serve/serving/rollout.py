"""A rollout as a state machine: entries of its journal go in, its state comes out. Pure; nothing is routed here.

    started → entering 0 → entered 0 → judged pass → entering 1 → entered 1 → … → judged pass → finishing → finished
                 │             │            │             │           │                            (only forward)
                 └─────────────┴────────────┴─────────────┴───────────┴──→ rolled_back

`entering` and `finishing` are written before traffic is touched, `entered` and `finished` when Envoy was read back:
after a kill the last entry says what to do again. A rollback is the other way round: weight 0 first, then the entry.
A rollout's state is the fold of its journal, so a restart and a replay cannot disagree with what happened.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from refit.release import Release
from refit.spec import Rollout as Policy
from serving.verdicts import Verdict


class Action(StrEnum):
    """What an entry says."""

    STARTED = "started"
    ENTERING = "entering"
    ENTERED = "entered"
    JUDGED = "judged"
    FINISHING = "finishing"
    FINISHED = "finished"
    ROLLED_BACK = "rolled_back"


class State(StrEnum):
    """Where a rollout stands."""

    RUNNING = "running"
    ROLLED_BACK = "rolled_back"
    FINISHED = "finished"


class Plan(BaseModel):
    """What a rollout was asked to be; never changes. Step 0 is the shadow step, `steps[n]` the share at step n."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:+-]{0,199}$")]
    pipeline: str
    candidate: Release
    champion: Release
    steps: tuple[int, ...]
    policy: Policy
    run_id: str | None = None

    @model_validator(mode="after")
    def _steps_rise_from_shadow_to_all(self) -> Self:
        steps = list(self.steps)
        if len(steps) < 2 or steps != sorted(set(steps)) or steps[0] != 0 or steps[-1] != 100:
            raise ValueError(f"steps are {steps}; they must rise from 0 (shadow) to 100, as in [0, 5, 20, 50, 100]")
        return self


class Entry(BaseModel):
    """One line of the journal. `weight` is the share after it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sequence: int
    at: float
    step: int
    weight: int
    action: Action
    verdict: Verdict | None = None
    why: str = ""
    measured: dict[str, Any] = {}


class Refused(Exception):
    """What was asked is not the next thing that may happen; says why."""


@dataclass(frozen=True)
class Rollout:
    """A plan and how far it has come."""

    plan: Plan
    state: State = State.RUNNING
    step: int = 0
    weight: int = 0
    entered_at: float | None = None
    verdict: Verdict = Verdict.WAIT
    why: str = "starting"
    sequence: int = 0
    started_at: float = 0.0
    ended_at: float | None = None
    finishing: bool = False

    @property
    def running(self) -> bool:
        """Whether it may still change anything."""
        return self.state is State.RUNNING

    @property
    def share(self) -> int:
        """The share of users that the current step asks for."""
        return self.plan.steps[self.step]

    @property
    def passed(self) -> bool:
        """Whether the current step has been passed; harm can still end the rollout."""
        return self.verdict is Verdict.PASS

    @property
    def last(self) -> bool:
        """Whether the current step is the last one."""
        return self.step == len(self.plan.steps) - 1

    def may_enter(self, step: int) -> bool:
        """Whether entering `step` is something to do (False: it was entered already).

        Raises:
            Refused: it is not the next one after a pass, or the rollout has ended.
        """
        if step <= self.step:
            return False  # asked again by a task that was tried again
        if not self.running:
            raise Refused(f"rollout {self.plan.id} is {self.state.replace('_', ' ')}: {self.why}")
        if step != self.step + 1 or step >= len(self.plan.steps):
            raise Refused(f"step {step} is not next: rollout {self.plan.id} is at step {self.step}")
        if not self.passed:
            raise Refused(f"step {self.step} has not passed: {self.verdict}, {self.why}")
        return True

    def may_finish(self) -> bool:
        """Whether finishing is something to do (False: it is finished already).

        Raises:
            Refused: the last step has not passed.
        """
        if self.state is State.FINISHED:
            return False
        if not self.running:
            raise Refused(f"rollout {self.plan.id} is {self.state.replace('_', ' ')}: {self.why}")
        if not (self.last and self.passed):
            raise Refused(f"step {self.step} of {len(self.plan.steps) - 1} is {self.verdict}: {self.why}")
        return True

    def entry(self, action: Action, at: float, why: str = "", **more: Any) -> Entry:
        """The next entry of the journal, at the current step unless `step` is given."""
        step = more.pop("step", self.step)
        weight = {
            Action.ENTERED: self.plan.steps[step],
            Action.FINISHED: 0,
            Action.ROLLED_BACK: 0,
        }.get(action, self.weight)
        return Entry(sequence=self.sequence + 1, at=at, step=step, weight=weight, action=action, why=why, **more)


def apply(rollout: Rollout, entry: Entry) -> Rollout:
    """The rollout after an entry; an entry that was applied before changes nothing.

    Raises:
        ValueError: the entry cannot follow: the journal has a hole, or is another rollout's.
    """
    if entry.sequence <= rollout.sequence:
        return rollout
    if entry.sequence != rollout.sequence + 1:
        raise ValueError(f"entry {entry.sequence} of rollout {rollout.plan.id} follows {rollout.sequence}")
    if not rollout.running:
        raise ValueError(f"rollout {rollout.plan.id} is {rollout.state}; nothing can follow")
    now = replace(rollout, sequence=entry.sequence, weight=entry.weight, why=entry.why or rollout.why)
    match entry.action:
        case Action.STARTED:
            return replace(now, started_at=entry.at)
        case Action.ENTERING:
            # The clock of the new step starts when it is live.
            return replace(now, step=entry.step, entered_at=None, verdict=Verdict.WAIT)
        case Action.ENTERED:
            return replace(now, entered_at=entry.at)
        case Action.JUDGED:
            return replace(now, verdict=entry.verdict or Verdict.WAIT)
        case Action.FINISHING:
            return replace(now, finishing=True)
        case Action.FINISHED:
            return replace(now, state=State.FINISHED, ended_at=entry.at)
        case Action.ROLLED_BACK:
            return replace(now, state=State.ROLLED_BACK, verdict=Verdict.FAIL, ended_at=entry.at)


def replay(plan: Plan, entries: Iterable[Entry]) -> Rollout:
    """The rollout that a journal tells of."""
    rollout = Rollout(plan)
    for entry in entries:
        rollout = apply(rollout, entry)
    return rollout
