"""What a step must show, and what never counts as having shown it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from refit.spec import Rollout as Policy
from refit.statistics import Summary
from serving.verdicts import NOBODY, Measured, Shadow, Side, Verdict, in_time, judge, stratified

POLICY = Policy(min_events=40, min_seconds=15, margin=0.1, shadow_pairs=30, deadline_minutes=5)
FAST = tuple(np.linspace(0.1, 0.3, 300))


def side(mean: float, users: int = 400, **more: object) -> Side:
    made = Side(
        requests=users, users=users, recent=50, age=1.0, latencies=FAST, events=users, feedback_age=1.0,
        outcomes=Summary(users, mean, mean * (1 - mean)),
    )  # fmt: skip
    return replace(made, **more)  # type: ignore[arg-type]


def measured(champion: Side, challenger: Side, **more: object) -> Measured:
    made = Measured(champion, challenger, strata=((champion.outcomes, challenger.outcomes),))
    return replace(made, **more)  # type: ignore[arg-type]


def verdict(
    found: Measured | None, weight: int = 50, seconds: float = 60.0, server: str | None = None
) -> tuple[Verdict, str]:
    judgement = judge(POLICY, weight, found, server, seconds)
    return judgement.verdict, judgement.why


def test_a_better_model_passes_and_a_worse_one_goes_back() -> None:
    assert verdict(measured(side(0.5), side(0.8)))[0] is Verdict.PASS
    found, why = verdict(measured(side(0.8), side(0.5)))
    assert found is Verdict.FAIL
    assert why.startswith("users are worse off: -0.300")


def test_an_equal_model_waits_until_enough_users_prove_it_not_worse() -> None:
    few, many = (measured(side(0.8, n), side(0.8, n)) for n in (60, 3000))
    assert verdict(few)[0] is Verdict.WAIT
    assert "not yet proven" in verdict(few)[1]
    assert verdict(many)[0] is Verdict.PASS


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (None, "the database does not answer"),
        (Measured(), "0 of 40 feedback events on the champion's side"),
        (measured(side(0.5), side(0.9, events=39)), "39 of 40 feedback events on the challenger's side"),
        (measured(side(0.5), side(0.9, age=90.0)), "no request on the challenger's side for 90 s"),
        (measured(side(0.5, feedback_age=90.0), side(0.9)), "no feedback on the champion's side for 90 s"),
        (measured(side(0.5), side(0.9, users=250)), "the split is broken"),
        (measured(side(0.5), side(0.9, failovers=10)), "the champion answered 10 of 50 recent requests"),
        (measured(side(0.5), side(0.9, errors=22)), "22 of 400 requests failed"),
        (measured(side(0.5), side(0.9, latencies=())), "latency is nan"),
        (measured(side(0.5), side(0.9, outcomes=Summary(400, math.nan, math.nan))), "not yet proven"),
        (measured(side(0.5), side(0.9, outcomes=NOBODY)), "not yet proven"),
    ],
)  # fmt: skip
def test_what_was_not_measured_well_is_a_wait(found: Measured | None, why: str) -> None:
    said = verdict(found)
    assert said[0] is Verdict.WAIT
    assert why in said[1]


def test_a_pass_waits_for_the_time_and_for_the_server() -> None:
    good = measured(side(0.5), side(0.9))
    assert verdict(good, seconds=14.0) == (Verdict.WAIT, "14 of at least 15 s")
    assert verdict(good, server="it is being started again")[0] is Verdict.WAIT
    assert verdict(good, seconds=15.0)[0] is Verdict.PASS


def test_harm_does_not_wait_for_anything() -> None:
    harmful = measured(side(0.9), side(0.2, events=3, age=900.0))
    assert verdict(harmful, seconds=0.0, server="gone")[0] is Verdict.FAIL


def test_a_model_that_fails_or_crawls_is_taken_back_even_if_users_like_it() -> None:
    assert "requests failed" in verdict(measured(side(0.5), side(0.9, errors=120)))[1]
    slow = tuple(np.linspace(1.0, 3.0, 300))
    assert verdict(measured(side(0.5), side(0.9, latencies=slow)))[1].startswith("latency is 10.0 times the champion's")


def test_errors_that_both_sides_have_are_not_the_candidates_fault() -> None:
    assert verdict(measured(side(0.5, errors=130), side(0.9, errors=120)))[0] is Verdict.WAIT


def test_at_100_percent_the_last_split_is_the_control() -> None:
    last = measured(side(0.5, age=600.0, feedback_age=600.0), side(0.9), concurrent=False)
    assert verdict(last, weight=100)[0] is Verdict.PASS
    worse = measured(
        side(0.9, age=600.0), side(0.3), concurrent=False, strata=((side(0.9).outcomes, side(0.9).outcomes),)
    )
    assert verdict(worse, weight=100)[0] is Verdict.FAIL


def test_the_mix_of_steps_is_the_same_on_both_sides() -> None:
    """Simpson's paradox: equal in each step, and the pooled means differ because the shares of users do."""
    easy, hard = Summary(950, 0.9, 0.09), Summary(50, 0.9, 0.09)
    later_old, later_new = Summary(500, 0.5, 0.25), Summary(500, 0.5, 0.25)
    old, new = stratified(((easy, hard), (later_old, later_new)))
    assert new.mean - old.mean == pytest.approx(0.0)
    assert stratified(()) == (NOBODY, NOBODY)
    assert stratified(((Summary(1, 1.0, math.nan), hard),)) == (NOBODY, NOBODY)


def test_the_variance_of_strata_is_that_of_their_weighted_mean() -> None:
    rng = np.random.default_rng(1)
    means = []
    for _ in range(2000):
        strata = tuple(
            (Summary.of(rng.random(n) < p), Summary.of(rng.random(m) < p)) for n, m, p in ((95, 25, 0.9), (60, 60, 0.4))
        )
        means.append(stratified(strata)[0].mean)
    exact = stratified(tuple(
        (Summary(n, p, p * (1 - p)), Summary(m, p, p * (1 - p))) for n, m, p in ((95, 25, 0.9), (60, 60, 0.4))
    ))[0]  # fmt: skip
    assert np.var(means) == pytest.approx(exact.variance / exact.n, rel=0.1)


def shadow(pairs: int, errors: int = 0, slow: float = 1.0) -> Measured:
    seconds = tuple(np.linspace(0.1, 0.2, pairs))
    return Measured(shadow=Shadow(
        (200,) * (pairs - errors) + (500,) * errors, seconds, tuple(s * slow for s in seconds), same=pairs // 2, age=1.0
    ))  # fmt: skip


def test_shadow_passes_on_enough_whole_answers() -> None:
    assert verdict(shadow(30), weight=0) == (Verdict.PASS, "30 shadow pairs, 0 errors, 15 answers the same")
    assert verdict(shadow(29), weight=0) == (Verdict.WAIT, "29 of 30 shadow pairs")
    assert verdict(Measured(), weight=0)[0] is Verdict.WAIT
    assert verdict(shadow(30), weight=0, server="gone")[0] is Verdict.WAIT
    assert verdict(shadow(40, errors=4), weight=0)[0] is Verdict.WAIT
    assert verdict(shadow(100, errors=60), weight=0)[0] is Verdict.FAIL
    assert verdict(shadow(400, slow=9.0), weight=0)[0] is Verdict.FAIL
    assert verdict(shadow(30, slow=9.0), weight=0)[0] is not Verdict.PASS


def test_no_shadow_asked_for_passes_at_once_but_not_without_a_server() -> None:
    policy = POLICY.model_copy(update={"shadow_pairs": 0})
    assert judge(policy, 0, None, None, 0.0).verdict is Verdict.PASS
    assert judge(policy, 0, None, "starting", 0.0).verdict is Verdict.WAIT


def test_a_wait_ends_at_the_deadline_and_a_pass_has_none() -> None:
    waiting, passing = (
        judge(POLICY, 50, None, None, 301.0),
        judge(POLICY, 50, measured(side(0.5), side(0.9)), None, 301.0),
    )
    assert in_time(POLICY, waiting, 299.0) == waiting
    late = in_time(POLICY, waiting, 301.0)
    assert late.verdict is Verdict.FAIL
    assert late.why.startswith("no verdict within 5 minutes")
    assert in_time(POLICY, passing, 301.0) == passing


def test_equal_models_are_hardly_ever_taken_back() -> None:
    """30 looks at two equal models: the rate of false rollbacks stays below alpha."""
    rng, rollbacks, rollouts = np.random.default_rng(7), 0, 200
    for _ in range(rollouts):
        old, new = rng.random((2, 600)) < 0.7
        for look in range(20, 601, 20):
            sides = [side(0.0, look, outcomes=Summary.of(values[:look])) for values in (old, new)]
            if verdict(measured(*sides))[0] is Verdict.FAIL:
                rollbacks += 1
                break
    assert rollbacks / rollouts <= POLICY.alpha
