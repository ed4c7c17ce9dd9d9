"""What Airflow does about a failure, by its kind: the error tree's `retry`, as a retry policy.

A preempted job comes back at once and as often as it must; what broke under a job gets a few tries, a while apart;
what a person must change is not tried again.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import RetryDecision, RetryPolicy

from operators.errors import NEVER_RETRIED
from refit.errors import Preempted

if TYPE_CHECKING:
    from airflow.sdk import Context

PREEMPTIONS = 50
"""How often a job may be sent away; also Airflow's own `retries`, which no policy can exceed."""

FAILURES = 3
"""How many retries everything else gets."""

COUNT = "failures"
"""The key of the task's own store under which its failures, preemptions not counted, are kept over retries."""


class ByKind(RetryPolicy):
    """Decides by the class of what was raised; counts failures apart from preemptions."""

    def __init__(self, pause: timedelta = timedelta(seconds=15)) -> None:
        self.pause = pause

    def evaluate(
        self, exception: BaseException, try_number: int, max_tries: int, context: Context | None = None
    ) -> RetryDecision:
        if isinstance(exception, NEVER_RETRIED):
            return RetryDecision.fail(f"{type(exception).__name__} is not tried again")
        if isinstance(exception, Preempted):
            return RetryDecision.retry(timedelta(seconds=1), "preempted: goes on from its checkpoint")
        failures = self._count(context, try_number)
        if failures > FAILURES:
            return RetryDecision.fail(f"failed {failures} times")
        return RetryDecision.retry(self.pause * failures, f"failure {failures} of {FAILURES + 1}")

    def serialize(self) -> dict[str, Any]:
        return {"pause": self.pause.total_seconds()}

    @classmethod
    def deserialize(cls, data: dict[str, Any]) -> ByKind:
        return cls(timedelta(seconds=data["pause"]))

    @staticmethod
    def _count(context: Context | None, try_number: int) -> int:
        """Failures so far, this one included; without the task's store every try counts as one."""
        kept = context.get("task_state_store") if context else None
        if kept is None:
            return try_number
        before = kept.get(COUNT)
        failures = (before if isinstance(before, int) else 0) + 1
        kept.set(COUNT, failures)
        return failures
