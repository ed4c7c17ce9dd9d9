"""The rollout's operators. The controller keeps people safe; Airflow decides what comes next, and waits deferred."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowSkipException

from operators import run
from operators.controller import Controller
from operators.errors import RolledBack, restore
from operators.triggers import RolloutTrigger
from refit import fingerprint

if TYPE_CHECKING:
    from airflow.sdk import Context

SLACK_SECONDS = 900.0
"""How long after a step's deadline a verdict may still come: the controller may have been away."""


def rollout_id(pipeline: str, run_id: str, release_id: str) -> str:
    """A run's rollout of a release: the same on every try."""
    return f"{pipeline}-{fingerprint.digest([run_id, release_id])[:12]}"


class RolloutStartOperator(BaseOperator):
    """Register a rollout with the controller: who, which shares, which policy. No user sees anything yet.

    Returns:
        The rollout's id.
    """

    template_fields: Sequence[str] = ("spec", "release")
    ui_color = "#fff6e8"

    def __init__(self, *, spec: str, release: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.spec = spec
        self.release = release

    def execute(self, context: Context) -> str:
        release, run_id = run.read_release(self.release), context["run_id"]
        name = rollout_id(release.pipeline, run_id, release.id)
        Controller().start_rollout(name, release, run.read_spec(self.spec).rollout, run_id)
        return name


class RolloutStepOperator(BaseOperator):
    """Enter a step of a rollout and wait, deferred, for the controller's verdict.

    Step 0 is shadow, step n the n-th share. A form may ask for fewer steps than the pipeline file, then the tasks of
    the others are skipped; or for more, then the last task walks through all that are left.

    What it does not do: measure, or roll back. The controller does both, also while Airflow is down; a step that it
    took back fails here with its reason, and is not tried again.
    """

    template_fields: Sequence[str] = ("spec", "rollout")
    ui_color = "#fff6e8"

    def __init__(self, *, spec: str, rollout: str, step: int, walks_on: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.spec = spec
        self.rollout = rollout
        self.step = step
        self.walks_on = walks_on

    def execute(self, context: Context) -> str:
        steps = run.read_spec(self.spec).rollout.steps
        if self.step > len(steps):
            raise AirflowSkipException(f"this run has {len(steps)} steps only: {', '.join(map(str, steps))} %")
        return self._enter(self.step)

    def conclude(self, context: Context, event: dict[str, Any], step: int) -> str:
        """After the wait: on to the next step, or the reason why not."""
        if event["status"] != "done":
            raise restore(event)
        return self._judge(event["rollout"], step)

    def _enter(self, step: int) -> str:
        policy = run.read_spec(self.spec).rollout
        rollout = Controller().enter_step(self.rollout, step) or Controller().rollout(self.rollout)
        if _settled(rollout, step):
            return self._judge(rollout, step)
        share = (0, *policy.steps)[step]
        self.log.info("step %d: %s", step, f"{share} % of users" if step else "shadow, nobody sees it")
        self.defer(
            trigger=RolloutTrigger(
                rollout_id=self.rollout, step=step, deadline=time.time() + policy.deadline_minutes * 60 + SLACK_SECONDS
            ),
            method_name="conclude",
            kwargs={"step": step},
        )
        raise AssertionError("defer raises")

    def _judge(self, rollout: dict[str, Any], step: int) -> str:
        passed = rollout["state"] == "finished" or rollout["step"] > step or (
            rollout["state"] == "running" and rollout["verdict"] == "pass"
        )  # fmt: skip
        if not passed:
            raise RolledBack(f"rolled back at step {rollout['step']}: {rollout.get('why') or 'no reason given'}")
        self.log.info("step %d passed: %s", step, rollout.get("why"))
        if self.walks_on and step < len(run.read_spec(self.spec).rollout.steps):
            return self._enter(step + 1)
        return self.rollout


class RolloutFinishOperator(BaseOperator):
    """End a rollout well: the candidate becomes the champion, the champion the previous one, kept warm for a while."""

    template_fields: Sequence[str] = ("rollout",)
    ui_color = "#fff6e8"

    def __init__(self, *, rollout: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.rollout = rollout

    def execute(self, context: Context) -> str:
        if not self.rollout:
            raise AirflowSkipException("no rollout was started")
        Controller().finish_rollout(self.rollout)
        return self.rollout


def _settled(rollout: dict[str, Any], step: int) -> bool:
    return rollout["state"] != "running" or rollout["step"] > step or rollout["verdict"] in ("pass", "fail")
