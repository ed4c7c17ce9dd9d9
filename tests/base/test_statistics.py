"""Intervals against published values, and error rates against simulation (seeded)."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from refit import statistics as st
from refit.statistics import Interval, Summary, Verdict

ALPHA = 0.05


# ------------------------------------------------------------------------------------------------------- fixed ones


def test_wilson_gives_the_published_values():
    """Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I (method 3)."""
    published = [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0, 0.1611), (1, 29, 0.0061, 0.1718)]
    for successes, n, low, high in published:
        interval = st.wilson(successes, n)
        assert (interval.low, interval.high) == pytest.approx((low, high), abs=5e-5)
    assert st.wilson(29, 29).high == 1.0
    assert st.wilson(0, 20).low == 0.0


def test_wilson_covers_as_often_as_it_says():
    random = np.random.default_rng(1)
    for share in (0.05, 0.5, 0.9):
        hits = random.binomial(200, share, 2000)
        inside = [interval.low <= share <= interval.high for interval in (st.wilson(int(k), 200) for k in hits)]
        assert np.mean(inside) == pytest.approx(0.95, abs=0.025)  # it swings with the share: counts are whole


def test_mcnemar_is_the_exact_binomial_test():
    assert st.mcnemar(5, 15) == pytest.approx(0.041389, abs=1e-6)  # R: binom.test(5, 20)
    assert st.mcnemar(15, 5) == st.mcnemar(5, 15)
    assert st.mcnemar(7, 7) == 1.0
    assert st.mcnemar(0, 0) == 1.0
    assert st.mcnemar(0, 10) == pytest.approx(2 / 2**10)
    assert 0 < st.mcnemar(900, 1300) < 1e-15  # no overflow, no underflow


def test_paired_difference_gives_the_published_interval():
    """Agresti 2002, "Categorical Data Analysis", table 10.1: 1600 people, 0.59 then 0.55: (-0.06, -0.02)."""
    old = np.repeat([1, 0, 1, 0], [794, 86, 150, 570])
    new = np.repeat([1, 1, 0, 0], [794, 86, 150, 570])
    interval = st.paired_difference(new, old)
    assert interval.value == pytest.approx(-0.04)
    assert (interval.low, interval.high) == pytest.approx((-0.0587, -0.0213), abs=3e-4)
    centre, spread = -64 / 1602, math.sqrt(237 - 64**2 / 1602) / 1602
    assert (interval.low, interval.high) == pytest.approx((centre - 1.959964 * spread, centre + 1.959964 * spread))


@pytest.mark.parametrize("binary", [True, False])
def test_paired_difference_covers_as_often_as_it_says(binary: bool):
    random = np.random.default_rng(2)
    inside = []
    for _ in range(600):
        difficulty = random.random(150)
        if binary:
            old, new = random.random(150) < difficulty, random.random(150) < np.minimum(1, difficulty + 0.1)
        else:
            old, new = difficulty, np.minimum(1, difficulty + 0.1) + random.normal(0, 0.2, 150)
        # E[min(1, d + 0.1)] - E[d] for uniform d is 0.095.
        interval = st.paired_difference(new, old)
        inside.append(interval.low <= 0.095 <= interval.high)
    assert np.mean(inside) == pytest.approx(0.95, abs=0.025)


def test_two_models_that_never_differ_are_not_certain_to_be_equal():
    interval = st.paired_difference([1] * 50 + [0] * 50, [1] * 50 + [0] * 50)
    assert interval.value == 0
    assert interval.low < -0.01 < 0.01 < interval.high


def test_pairs_must_be_pairs():
    with pytest.raises(ValueError, match="same items"):
        st.paired_difference([1, 0], [1])


def test_a_bootstrap_is_repeatable_and_near_the_formula():
    values = np.random.default_rng(3).normal(5, 2, 400)

    def mean(rows: st.Floats) -> st.Floats:
        return rows.mean(axis=1)

    first, again = (st.bootstrap(values, mean, seed=7) for _ in range(2))
    assert first == again
    half = 1.96 * values.std(ddof=1) / 20
    assert (first.low, first.high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.03)


def test_a_broken_split_is_seen_and_a_right_one_is_not():
    assert st.sample_ratio_p(500, 500, 0.5) == 1.0
    # Kohavi, Tang and Xu 2020, "Trustworthy Online Controlled Experiments", chapter 3.
    assert st.sample_ratio_p(821_588, 815_482, 0.5) == pytest.approx(1.8e-6, rel=0.03)
    assert st.sample_ratio_p(1900, 100, 0.05) > 0.9
    assert st.sample_ratio_p(1800, 200, 0.05) < st.SAMPLE_RATIO_ALPHA
    random = np.random.default_rng(4)
    alarms = [st.sample_ratio_p(2000 - int(k), int(k), 0.2) < 0.01 for k in random.binomial(2000, 0.2, 5000)]
    assert np.mean(alarms) == pytest.approx(0.01, abs=0.005)


# ------------------------------------------------------------------------------------------------- always-valid ones


def rollouts(
    rate: float, effect: float, share: float, *, users: int = 2000, runs: int = 400, looks: int = 30, seed: int = 5,
    requests: int = 1,
) -> tuple[float, float, float]:  # fmt: skip
    """Share of simulated rollouts called harmful, better, and harmful by a naive test, at any of the looks.

    A user's requests (`requests` at most) arrive over the whole rollout, so that a user's mean moves between looks.
    """
    random = np.random.default_rng(seed)
    called = {"harm": 0, "better": 0, "naive": 0}
    for _ in range(runs):
        challenger = random.random(users) < share
        works = np.clip(rate + random.normal(0, 0.1, users), 0, 1) if requests > 1 else np.full(users, rate)
        events = random.random((requests, users)) < np.clip(works + effect * challenger, 0, 1)
        seen = set()
        for last in np.linspace(users / looks, users, looks).astype(int) * requests:
            rows, rest = divmod(int(last), users)
            count = np.full(users, rows) + (np.arange(users) < rest)
            sums = events[:rows].sum(axis=0) + (events[min(rows, requests - 1)] & (np.arange(users) < rest))
            here = count > 0
            means = sums[here] / count[here]
            sides = [Summary.of(means[challenger[here] == side]) for side in (False, True)]
            if min(side.n for side in sides) < 20:
                continue
            interval = st.difference_sequence(*sides, ALPHA)
            seen |= {"harm"} if interval.high < 0 else set()
            seen |= {"better"} if interval.low > 0 else set()
            error = math.sqrt(sum(side.variance / side.n for side in sides))
            seen |= {"naive"} if interval.value < -1.645 * error else set()
        for name in seen:
            called[name] += 1
    return called["harm"] / runs, called["better"] / runs, called["naive"] / runs


@pytest.mark.parametrize(("rate", "share"), [(0.7, 0.05), (0.7, 0.5), (0.95, 0.05), (0.05, 0.05)])
def test_thirty_looks_at_two_equal_models_roll_back_no_more_than_alpha(rate: float, share: float):
    harm, better, naive = rollouts(rate, 0.0, share)
    assert harm + better <= ALPHA
    if rate == 0.7:
        assert naive > 2 * ALPHA  # what looking thirty times does to a test that is meant for one look


def test_users_who_come_back_count_once_and_raise_no_alarm():
    harm, better, _ = rollouts(0.7, 0.0, 0.2, requests=4, users=600, runs=200)
    assert harm + better <= ALPHA


def test_a_much_worse_model_is_caught_at_the_first_step():
    harm, better, _ = rollouts(0.7, -0.3, 0.05, runs=100)
    assert harm > 0.95
    assert better == 0


def test_a_better_model_is_proven_not_worse():
    random = np.random.default_rng(6)
    old, new = (Summary.of(random.random(n) < rate) for n, rate in ((1900, 0.4), (100, 0.7)))
    assert st.judge_difference(st.difference_sequence(old, new, ALPHA), margin=0.05) is Verdict.NOT_WORSE


def test_all_well_on_a_few_users_is_not_certainty():
    interval = st.difference_sequence(Summary.of([1.0] * 30), Summary.of([1.0] * 30), ALPHA)
    assert interval.value == 0
    assert interval.low < -0.05


def test_an_error_rate_is_bounded_at_every_look():
    random = np.random.default_rng(7)
    outside = 0
    for _ in range(300):
        events = np.cumsum(random.random(600) < 0.05)
        looks = (st.rate_sequence(int(events[n - 1]), n, ALPHA) for n in range(20, 601, 20))
        outside += any(not interval.low <= 0.05 <= interval.high for interval in looks)
    assert outside / 300 <= ALPHA
    assert st.rate_sequence(0, 200, ALPHA).low == 0
    assert st.rate_sequence(0, 200, ALPHA).high < 0.05
    assert st.rate_sequence(60, 200, ALPHA).low > 0.2
    assert st.rate_sequence(0, 0, ALPHA).known is False


def test_a_latency_quantile_is_bounded_at_every_look():
    random = np.random.default_rng(8)
    truth = -math.log(0.05)  # the 95th percentile of a standard exponential
    outside = 0
    for _ in range(300):
        values = random.exponential(size=900)
        looks = (st.quantile_sequence(values[:n], 0.95, ALPHA) for n in range(30, 901, 30))
        outside += any(not interval.low <= truth <= interval.high for interval in looks)
    assert outside / 300 <= ALPHA


def test_a_quantile_equals_its_slow_twin():
    values = np.random.default_rng(9).exponential(size=150)
    fast, ordered = st.quantile_sequence(values, 0.9, ALPHA), np.sort(values)
    counts = [k for k in range(151) if st._log_evidence(k, 150, 0.9, ALPHA, 500) < -math.log(ALPHA)]
    assert fast.low == ordered[counts[0] - 1]
    assert fast.high == (ordered[counts[-1]] if counts[-1] < 150 else math.inf)


def test_a_latency_ratio_says_nothing_until_both_sides_have_enough():
    random = np.random.default_rng(10)
    slow, fast = random.exponential(3.0, 400), random.exponential(1.0, 400)
    assert st.judge_ceiling(st.latency_ratio_sequence(fast[:10], slow[:10], 0.95, ALPHA), 1.5) is Verdict.UNKNOWN
    assert st.judge_ceiling(st.latency_ratio_sequence(fast, slow, 0.95, ALPHA), 1.5) is Verdict.HARM
    assert st.judge_ceiling(st.latency_ratio_sequence(fast, fast, 0.95, ALPHA), 3.0) is Verdict.NOT_WORSE
    assert st.latency_ratio_sequence([], fast, 0.95, ALPHA).known is False


# ------------------------------------------------------------------------------------------------------- verdicts


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        (Interval(-0.2, -0.3, -0.1), Verdict.HARM),
        (Interval(-0.02, -0.03, -0.01), Verdict.HARM),  # proven worse, though within the margin
        (Interval(0.0, -0.04, 0.04), Verdict.NOT_WORSE),
        (Interval(0.0, -0.2, 0.2), Verdict.UNKNOWN),
        (st.NOTHING, Verdict.UNKNOWN),
        (Interval(math.nan, -0.01, 0.1), Verdict.UNKNOWN),
    ],
)
def test_a_difference_has_three_verdicts(interval: Interval, expected: Verdict):
    assert st.judge_difference(interval, margin=0.05) is expected


def test_no_data_is_never_evidence():
    nothing, some = Summary.of([]), Summary.of([1.0, 0.0, 1.0])
    for pair in [(nothing, some), (some, nothing), (some, Summary.of([1.0])), (some, Summary.of([math.nan, 1.0]))]:
        assert st.judge_difference(st.difference_sequence(*pair, ALPHA), 0.05) is Verdict.UNKNOWN
    assert st.wilson(0, 0).known is False
    assert st.paired_difference([], []).known is False
    assert st.paired_difference([math.nan, 1], [1, 0]).known is False
    assert math.isnan(st.sample_ratio_p(0, 0, 0.5))


def test_verdicts_together_pass_only_when_all_do():
    harm, fine, unknown = Verdict.HARM, Verdict.NOT_WORSE, Verdict.UNKNOWN
    assert st.together([fine, unknown, harm]) is harm
    assert st.together([fine, fine]) is fine
    assert st.together([fine, unknown]) is unknown
    assert st.together([]) is unknown


def test_facts_are_json_even_where_nothing_is_known():
    text = json.dumps([st.NOTHING.facts(), Interval(1.0, 0.0, math.inf).facts()], allow_nan=False)
    assert json.loads(text)[1] == {"value": 1.0, "low": 0.0, "high": None}
