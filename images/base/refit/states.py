"""The states of a job, and which change into which.

pending → scheduled → running → succeeded
   │          │          ├────→ failed
   │          │          └────→ suspended ⇄ retrying
   └──────────┴───────────────→ failed (refused, cancelled)
"""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """Where a job stands."""

    PENDING = "pending"
    SCHEDULED = "scheduled"
    RUNNING = "running"
    SUSPENDED = "suspended"
    RETRYING = "retrying"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


NEXT: dict[State, frozenset[State]] = {
    State.PENDING: frozenset({State.SCHEDULED, State.RUNNING, State.FAILED}),
    State.SCHEDULED: frozenset({State.RUNNING, State.RETRYING, State.FAILED}),
    State.RUNNING: frozenset({State.SUCCEEDED, State.FAILED, State.SUSPENDED, State.RETRYING}),
    State.SUSPENDED: frozenset({State.RETRYING, State.FAILED}),
    State.RETRYING: frozenset({State.SCHEDULED, State.RUNNING, State.FAILED}),
    State.SUCCEEDED: frozenset(),
    # A failed job can be started again by a person or a retry; a succeeded one never changes.
    State.FAILED: frozenset({State.RETRYING}),
}


def before(then: State) -> frozenset[State]:
    """The states that may become `then`."""
    return frozenset(now for now, after in NEXT.items() if then in after)


def step(now: State, then: State) -> State:
    """`then`, if `now` may become it.

    Raises:
        ValueError: the change is not one of `NEXT`.
    """
    if then not in NEXT[now]:
        raise ValueError(f"a {now} job cannot become {then}")
    return then
