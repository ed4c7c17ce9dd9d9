"""Which machine a job is on, by its events."""

from __future__ import annotations

from operators.projection import host_of


def test_an_event_says_on_which_machine_its_job_is() -> None:
    assert host_of({"node": "n7", "reason": "attempt 1 on n1"}) == "n7"


def test_older_events_say_it_at_the_end_of_a_reason_and_others_do_not() -> None:
    assert host_of({"reason": "attempt 2 on n1"}) == "n1"
    assert host_of({"reason": "odd batch at step 7: look on page 3"}) is None
    assert host_of({"reason": None}) is None
