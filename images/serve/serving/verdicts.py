"""What a step of a rollout has shown: pass, fail, or wait. Pure: measurements go in, a verdict and its reason come out.

    fail   harm is proven (on what users said, on errors, on latency): back at once
    pass   the candidate is proven not worse than the champion by more than the margin, and every guardrail holds
    wait   everything else: too little data, stale data, NaN, a broken split, a server that is down, no database

No data is never a pass. All tests are valid however often one looks (`refit.statistics`, the `*_sequence` functions).
A side is the side that users were assigned to, whatever served them; steps are strata with a control of their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from refit import statistics
from refit.spec import Rollout as Policy
from refit.statistics import SAMPLE_RATIO_ALPHA, Interval, Summary, judge_ceiling, judge_difference
from refit.statistics import Verdict as Shown

LATENCY_QUANTILE = 0.9
NOBODY = Summary(0, math.nan, math.nan)


class Verdict(StrEnum):
    """What the controller says of a step."""

    WAIT = "wait"
    PASS = "pass"
    FAIL = "fail"


@dataclass(frozen=True)
class Judgement:
    """A verdict, its reason in words, and the numbers behind it."""

    verdict: Verdict
    why: str
    measured: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Side:
    """What happened to the users of one side at one step. `age` is the seconds since its newest request."""

    requests: int = 0
    users: int = 0
    errors: int = 0
    recent: int = 0
    failovers: int = 0
    age: float = math.inf
    latencies: tuple[float, ...] = ()
    outcomes: Summary = NOBODY
    events: int = 0
    feedback_age: float = math.inf


@dataclass(frozen=True)
class Shadow:
    """Pairs of a shadow step: the candidate's status codes, and the seconds of both."""

    statuses: tuple[int, ...] = ()
    champion_seconds: tuple[float, ...] = ()
    candidate_seconds: tuple[float, ...] = ()
    same: int = 0
    age: float = math.inf


@dataclass(frozen=True)
class Measured:
    """One look at a step.

    `concurrent` is whether champion and challenger were measured at the same time; at 100 % the control is the last
    step's. `strata` are (champion, challenger) of every step so far that had both.
    """

    champion: Side = Side()
    challenger: Side = Side()
    strata: tuple[tuple[Summary, Summary], ...] = ()
    concurrent: bool = True
    shadow: Shadow = Shadow()


FIRST_LOOK_SECONDS = 15.0
"""A step that is younger than this may not have been measured yet; nothing is wrong with that."""


def judge(policy: Policy, weight: int, measured: Measured | None, server: str | None, seconds: float) -> Judgement:
    """The verdict on a step.

    Args:
        weight: the challenger's share in percent; 0 is the shadow step.
        measured: None where the database cannot be asked.
        server: why the candidate's server does not serve now; None where it does.
        seconds: how long the step has been live.
    """
    if weight == 0 and policy.shadow_pairs == 0:
        if server is not None:
            return Judgement(Verdict.WAIT, f"the candidate's server: {server}")
        return Judgement(Verdict.PASS, "no shadow pairs are asked for")
    if measured is None:
        away = "nothing can be measured: the database does not answer"
        return Judgement(Verdict.WAIT, away if seconds > FIRST_LOOK_SECONDS else "not measured yet")
    found = _shadow(policy, measured.shadow) if weight == 0 else _canary(policy, weight, measured)
    if found.verdict is not Verdict.PASS:
        return found
    if server is not None:
        return Judgement(Verdict.WAIT, f"the candidate's server: {server}", found.measured)
    if weight and seconds < policy.min_seconds:
        return Judgement(Verdict.WAIT, f"{seconds:.0f} of at least {policy.min_seconds:g} s", found.measured)
    return found


def in_time(policy: Policy, judgement: Judgement, seconds: float) -> Judgement:
    """The same verdict, or fail where it is still wait at the step's deadline."""
    if judgement.verdict is Verdict.WAIT and seconds > policy.deadline_minutes * 60:
        why = f"no verdict within {policy.deadline_minutes:g} minutes ({judgement.why})"
        return Judgement(Verdict.FAIL, why, judgement.measured)
    return judgement


# ---------------------------------------------------------------------------------------------------------- shadow


def _shadow(policy: Policy, shadow: Shadow) -> Judgement:
    pairs = len(shadow.statuses)
    errors = sum(not 200 <= status < 300 for status in shadow.statuses)
    rate = statistics.rate_sequence(errors, pairs, policy.alpha)
    ratio = _latency(policy, shadow.champion_seconds, shadow.candidate_seconds)
    facts = {"pairs": pairs, "same": shadow.same, "error_rate": rate.facts(), "latency_ratio": ratio.facts()}
    if judge_ceiling(rate, policy.max_error_rate) is Shown.HARM:
        return Judgement(Verdict.FAIL, f"the candidate fails {errors} of {pairs} shadow requests", facts)
    if judge_ceiling(ratio, policy.max_latency_ratio) is Shown.HARM:
        return Judgement(Verdict.FAIL, f"the candidate is {ratio.value:.1f} times as slow as the champion", facts)
    if pairs < policy.shadow_pairs:
        return Judgement(Verdict.WAIT, f"{pairs} of {policy.shadow_pairs} shadow pairs", facts)
    if errors / pairs > policy.max_error_rate:
        return Judgement(Verdict.WAIT, f"the candidate fails {errors} of {pairs} shadow requests", facts)
    if not ratio.value <= policy.max_latency_ratio:
        return Judgement(Verdict.WAIT, f"latency is {ratio.value:.1f} times the champion's", facts)
    return Judgement(Verdict.PASS, f"{pairs} shadow pairs, {errors} errors, {shadow.same} answers the same", facts)


# ---------------------------------------------------------------------------------------------------------- canary


def _canary(policy: Policy, weight: int, measured: Measured) -> Judgement:
    old, new = measured.champion, measured.challenger
    here, pooled = _differences(policy, measured)
    errors = statistics.rate_sequence(new.errors, new.requests, policy.alpha)
    ratio = _latency(policy, old.latencies, new.latencies)
    split = statistics.sample_ratio_p(old.users, new.users, weight / 100) if measured.concurrent else math.nan
    facts = {
        "users": [old.users, new.users], "events": [old.events, new.events], "means": [_json(old), _json(new)],
        "difference": pooled.facts(), "difference_here": here.facts(), "error_rate": errors.facts(),
        "failovers": new.failovers, "latency_ratio": ratio.facts(), "split_p": split if math.isfinite(split) else None,
    }  # fmt: skip

    harm = _harm(policy, old, new, here, pooled, errors, ratio)
    if harm:
        return Judgement(Verdict.FAIL, harm, facts)
    hold = _hold(policy, old, new, measured.concurrent, split, errors, ratio)
    if hold:
        return Judgement(Verdict.WAIT, hold, facts)
    if judge_difference(pooled, policy.margin) is not Shown.NOT_WORSE:
        return Judgement(Verdict.WAIT, f"not yet proven not worse: {_points(pooled)}, margin {policy.margin:g}", facts)
    return Judgement(Verdict.PASS, f"not worse: {_points(pooled)}, margin {policy.margin:g}", facts)


def _differences(policy: Policy, measured: Measured) -> tuple[Interval, Interval]:
    """This step's difference, and that of all steps with a control of their own; each takes half of alpha."""
    tuned = max(100, 4 * policy.min_events)
    here = statistics.difference_sequence(
        measured.champion.outcomes, measured.challenger.outcomes, policy.alpha / 2, tuned
    )
    if not measured.strata:
        return here, here
    return here, statistics.difference_sequence(*stratified(measured.strata), policy.alpha / 2, tuned)


def _harm(
    policy: Policy, old: Side, new: Side, here: Interval, pooled: Interval, errors: Interval, ratio: Interval
) -> str | None:
    for difference in (pooled, here):
        if judge_difference(difference, policy.margin) is Shown.HARM:
            return f"users are worse off: {_points(difference)}"
    champions = statistics.rate_sequence(old.errors, old.requests, policy.alpha)
    if judge_ceiling(errors, policy.max_error_rate) is Shown.HARM and errors.low > _or(champions.value, 0.0):
        return f"{new.errors} of {new.requests} requests failed (the champion's: {old.errors} of {old.requests})"
    if judge_ceiling(ratio, policy.max_latency_ratio) is Shown.HARM:
        return f"latency is {ratio.value:.1f} times the champion's (allowed: {policy.max_latency_ratio:g})"
    return None


def _hold(
    policy: Policy, old: Side, new: Side, concurrent: bool, split: float, errors: Interval, ratio: Interval
) -> str | None:
    sides = (("champion", old), ("challenger", new)) if concurrent else (("challenger", new),)
    for name, side in sides:
        if side.events < policy.min_events:
            return f"{side.events} of {policy.min_events} feedback events on the {name}'s side"
        if side.age > policy.stale_seconds:
            return f"no request on the {name}'s side for {side.age:.0f} s"
        if side.feedback_age > policy.stale_seconds:
            return f"no feedback on the {name}'s side for {side.feedback_age:.0f} s"
    if split < SAMPLE_RATIO_ALPHA:
        return f"the split is broken: {old.users} users against {new.users} (p {split:.1g})"
    if new.recent and new.failovers / new.recent > policy.max_error_rate:
        return f"the champion answered {new.failovers} of {new.recent} recent requests in the candidate's place"
    if not errors.value <= policy.max_error_rate:
        return f"{new.errors} of {new.requests} requests failed"
    if not ratio.value <= policy.max_latency_ratio:
        return f"latency is {ratio.value:.1f} times the champion's"
    return None


def stratified(strata: tuple[tuple[Summary, Summary], ...]) -> tuple[Summary, Summary]:
    """Both sides over all steps, with the same mix of steps on either.

    A side's mean is the weighted mean of its strata, a stratum's weight being its effective number of pairs,
    n1 n2 / (n1 + n2). Without it a good day would count for whoever had more users that day (Simpson 1951). Strata are
    taken as independent; a user who comes back at the next step makes the interval a little too narrow.
    """
    usable = [
        (old, new) for old, new in strata
        if min(old.n, new.n) >= 2 and math.isfinite(old.variance + new.variance)
    ]  # fmt: skip
    if not usable:
        return NOBODY, NOBODY
    weights = np.array([old.n * new.n / (old.n + new.n) for old, new in usable])
    weights /= weights.sum()
    sides = []
    for index in (0, 1):
        n = np.array([pair[index].n for pair in usable])
        means = np.array([pair[index].mean for pair in usable])
        variances = np.array([pair[index].variance for pair in usable])
        total = int(n.sum())
        sides.append(Summary(total, float(weights @ means), float((weights**2 * variances / n).sum() * total)))
    return sides[0], sides[1]


def _latency(policy: Policy, champion: tuple[float, ...], challenger: tuple[float, ...]) -> Interval:
    return statistics.latency_ratio_sequence(champion, challenger, LATENCY_QUANTILE, policy.alpha)


def _points(difference: Interval) -> str:
    return f"{difference.value:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}]"


def _or(value: float, otherwise: float) -> float:
    return value if math.isfinite(value) else otherwise


def _json(side: Side) -> float | None:
    return side.outcomes.mean if math.isfinite(side.outcomes.mean) else None
