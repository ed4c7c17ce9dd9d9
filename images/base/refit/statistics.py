"""What a number is worth: intervals for an evaluation, and tests that stay honest while a rollout is watched.

Two kinds live here, and they must not be mixed up. *Fixed* ones (Wilson, the paired difference, McNemar, the bootstrap)
are right for data that is looked at once, as an evaluation is. *Always-valid* ones (`*_sequence`) hold at every look
together: the chance that the truth ever leaves them is at most alpha, however often one looks and whenever one stops.

No data is never evidence: empty or NaN input gives an interval that says nothing (NaN, or an end at infinity), and the
verdict of such an interval is `unknown`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats: TypeAlias = NDArray[np.float64]

SAMPLE_RATIO_ALPHA = 0.001
"""Below this p the split itself is broken, and what it measured is not used (Fabijan et al. 2019)."""


@dataclass(frozen=True)
class Interval:
    """An estimate with its interval; NaN where nothing is known."""

    value: float
    low: float
    high: float

    @property
    def known(self) -> bool:
        """Whether there is an estimate at all."""
        return not any(math.isnan(x) for x in (self.value, self.low, self.high))

    def facts(self) -> dict[str, float | None]:
        """For a manifest or an answer over HTTP: JSON has neither NaN nor infinity."""
        ends = {"value": self.value, "low": self.low, "high": self.high}
        return {name: number if math.isfinite(number) else None for name, number in ends.items()}


NOTHING = Interval(math.nan, math.nan, math.nan)


@dataclass(frozen=True)
class Summary:
    """One side of a comparison: number of units (users), mean and sample variance of their values."""

    n: int
    mean: float
    variance: float

    @classmethod
    def of(cls, values: ArrayLike) -> Summary:
        """The summary of one value a unit: a user counts once, by the mean of what they did."""
        array = np.asarray(values, dtype=np.float64)
        if array.size == 0:
            return cls(0, math.nan, math.nan)
        return cls(int(array.size), float(array.mean()), float(array.var(ddof=1)) if array.size > 1 else math.nan)


class Verdict(StrEnum):
    """What a comparison says of the challenger. `UNKNOWN` also stands for no data, and is never a pass."""

    HARM = "harm"
    NOT_WORSE = "not_worse"
    UNKNOWN = "unknown"


# ----------------------------------------------------------------------------------------- fixed: looked at once


def wilson(successes: int, n: int, confidence: float = 0.95) -> Interval:
    """The score interval of a proportion: right near 0 and 1, and never outside.

    Source: Wilson 1927; recommended by Brown, Cai and DasGupta 2001, "Interval Estimation for a Binomial Proportion".
    """
    if n == 0:
        return NOTHING
    z, share = _z(confidence), successes / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # At the ends the formula gives exactly 0 and 1; floating point does not.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return Interval(share, low, high)


def paired_difference(candidate: ArrayLike, champion: ArrayLike, confidence: float = 0.95, seed: int = 1) -> Interval:
    """The mean of candidate minus champion over the same items, in the same order.

    Pairing takes the items' own difficulty out of the error (Miller 2024, "Adding Error Bars to Evals"). Scores of 0
    and 1 get the adjusted interval of Agresti and Min 2005 ("Simple improved confidence intervals for comparing matched
    proportions": half an item added to each cell), which keeps its width where the two never differ; other scores
    get a bootstrap.
    """
    new, old = np.asarray(candidate, dtype=np.float64), np.asarray(champion, dtype=np.float64)
    if new.shape != old.shape:
        raise ValueError(f"{new.size} scores against {old.size}: pairs need the same items on both sides")
    difference = new - old
    n = difference.size
    if n == 0 or not np.isfinite(difference).all():
        return NOTHING
    if not _binary(new) or not _binary(old):
        return bootstrap(difference, lambda rows: rows.mean(axis=1), confidence, seed=seed)
    gained, lost = float((difference > 0).sum()), float((difference < 0).sum())
    centre = (gained - lost) / (n + 2)
    half = _z(confidence) * math.sqrt(gained + lost + 1 - (gained - lost) ** 2 / (n + 2)) / (n + 2)
    return Interval(float(difference.mean()), max(-1.0, centre - half), min(1.0, centre + half))


def mcnemar(gained: int, lost: int) -> float:
    """Exact two-sided p that items won and items lost are equally likely (1.0 where nothing changed).

    Source: McNemar 1947, in its exact (binomial sign test) form; integers all the way, so no rounding at any n.
    """
    n = gained + lost
    if n == 0:
        return 1.0
    tail, term = 0, 1
    for k in range(min(gained, lost) + 1):
        tail += term
        term = term * (n - k) // (k + 1)
    return min(1.0, 2 * tail / (1 << n))


def bootstrap(
    values: ArrayLike, statistic: Callable[[Floats], Floats], confidence: float = 0.95, *, seed: int, draws: int = 2000
) -> Interval:
    """The percentile interval of a statistic (Efron 1979); `statistic` maps (draws, n) to (draws,)."""
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0 or not np.isfinite(array).all():
        return NOTHING
    index = np.random.default_rng(seed).integers(0, array.size, (draws, array.size))
    low, high = np.quantile(statistic(array[index]), [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(statistic(array[None])[0]), float(low), float(high))


def sample_ratio_p(champion: int, challenger: int, challenger_share: float) -> float:
    """p that the users on the two sides came from the split that was asked for; compare with `SAMPLE_RATIO_ALPHA`.

    NaN where the split leaves one side empty by intent or nobody was counted. Source: Pearson 1900, one degree of
    freedom; as used by Fabijan et al. 2019.
    """
    total = champion + challenger
    if total == 0 or not 0 < challenger_share < 1:
        return math.nan
    expected = total * challenger_share
    chi2 = (challenger - expected) ** 2 * (1 / expected + 1 / (total - expected))
    return math.erfc(math.sqrt(chi2 / 2))


# ------------------------------------------------------------------------------ always valid: looked at all the time


def difference_sequence(champion: Summary, challenger: Summary, alpha: float, tuned_at: int = 500) -> Interval:
    """Challenger minus champion, valid at every look together; values must lie between 0 and 1.

    Source: Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas 2021, "Time-uniform central limit theory and asymptotic
    confidence sequences", theorem 2.2 (normal mixture), on the influence of each user in a split of constant weight: a
    rollout's steps are strata of their own. Like its source it is exact only as users grow many; what holds for few is
    the variance of each side with one best and one worst user added (Agresti and Caffo 2000), so that a side on which
    all went well does not claim to be certain. Measured error rates are in the tests.

    Args:
        champion: users assigned to the champion in this step, one value each.
        challenger: users assigned to the challenger.
        alpha: chance that the truth is ever outside; each end is wrong with about half of it.
        tuned_at: number of users, both sides together, at which the interval is to be narrowest.
    """
    if champion.n < 2 or challenger.n < 2:
        return NOTHING
    value = challenger.mean - champion.mean
    variance = _cautious_variance(champion) / champion.n + _cautious_variance(challenger) / challenger.n
    if not math.isfinite(value + variance):
        return NOTHING
    n = champion.n + challenger.n
    scale = n * _mixture_rate(alpha) / tuned_at
    half = math.sqrt(variance * 2 * (scale + 1) / scale * (0.5 * math.log(scale + 1) - math.log(alpha)))
    return Interval(value, value - half, value + half)


def rate_sequence(events: int, n: int, alpha: float, tuned_at: int = 500) -> Interval:
    """A proportion (an error rate), valid at every look together, exactly, at any n.

    Source: Robbins 1970, "Statistical methods related to the law of the iterated logarithm", with a beta mixture
    centred on each rate that is tested; Howard, Ramdas, McAuliffe and Sekhon 2021.
    """
    if n == 0:
        return Interval(math.nan, 0.0, 1.0)
    share = events / n

    def believable(rate: float) -> bool:
        return _log_evidence(events, n, rate, alpha, tuned_at) < -math.log(alpha)

    low = 0.0 if events == 0 else _edge(believable, outside=0.0, inside=share)
    high = 1.0 if events == n else _edge(believable, outside=1.0, inside=share)
    return Interval(share, low, high)


def quantile_sequence(values: ArrayLike, quantile: float, alpha: float, tuned_at: int = 500) -> Interval:
    """A quantile between two order statistics, valid at every look together; an end is infinite while n is too small.

    Source: Howard and Ramdas 2022, "Sequential estimation of quantiles with applications to A/B testing", with the
    beta-binomial mixture: of n values the number at or below the true quantile is binomial, whatever their law.
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    n = ordered.size
    if n == 0 or not np.isfinite(ordered).all():
        return NOTHING
    # The evidence against each possible count of values below the quantile, by the ratio of neighbours.
    a, b = _beta_prior(quantile, alpha, tuned_at)
    counts = np.arange(n, dtype=np.float64)
    steps = np.log((a + counts) * (1 - quantile) / ((b + n - counts - 1) * quantile))
    evidence = _log_evidence(0, n, quantile, alpha, tuned_at) + np.concatenate([[0.0], np.cumsum(steps)])
    believable = np.flatnonzero(evidence < -math.log(alpha))
    first, last = int(believable[0]), int(believable[-1])
    return Interval(
        float(np.quantile(ordered, quantile)),
        float(ordered[first - 1]) if first else -math.inf,
        float(ordered[last]) if last < n else math.inf,
    )


def latency_ratio_sequence(
    champion: ArrayLike, challenger: ArrayLike, quantile: float, alpha: float, tuned_at: int = 500
) -> Interval:
    """Challenger's latency quantile over the champion's, valid at every look together; a side takes half of alpha."""
    old = quantile_sequence(champion, quantile, alpha / 2, tuned_at)
    new = quantile_sequence(challenger, quantile, alpha / 2, tuned_at)
    if not (old.known and new.known) or old.value <= 0:
        return NOTHING
    low = max(0.0, new.low) / old.high  # an infinite denominator is 0: nothing is known from below
    high = new.high / old.low if old.low > 0 else math.inf
    return Interval(new.value / old.value, low, high)


# ---------------------------------------------------------------------------------------------------- verdicts


def judge_difference(difference: Interval, margin: float) -> Verdict:
    """Harm where the whole interval is below 0, not worse where it is above -margin; harm first where both hold."""
    if not difference.known:
        return Verdict.UNKNOWN
    if difference.high < 0:
        return Verdict.HARM
    return Verdict.NOT_WORSE if difference.low > -margin else Verdict.UNKNOWN


def judge_ceiling(measured: Interval, ceiling: float) -> Verdict:
    """Harm where the whole interval is above a ceiling (of a latency ratio, an error rate), not worse where below."""
    if not measured.known:
        return Verdict.UNKNOWN
    if measured.low > ceiling:
        return Verdict.HARM
    return Verdict.NOT_WORSE if measured.high <= ceiling else Verdict.UNKNOWN


def together(verdicts: Iterable[Verdict]) -> Verdict:
    """One harm is harm; not worse only where every one says so, and there is one."""
    found = set(verdicts)
    if Verdict.HARM in found:
        return Verdict.HARM
    return Verdict.NOT_WORSE if found == {Verdict.NOT_WORSE} else Verdict.UNKNOWN


# --------------------------------------------------------------------------------------------------- inner parts


def _z(confidence: float) -> float:
    return NormalDist().inv_cdf((1 + confidence) / 2)


def _binary(scores: Floats) -> bool:
    return bool(np.isin(scores, (0.0, 1.0)).all())


def _cautious_variance(side: Summary) -> float:
    n, squares = side.n, (side.n - 1) * side.variance + side.n * side.mean**2
    mean = (n * side.mean + 1) / (n + 2)
    return (squares + 1 - (n + 2) * mean**2) / (n + 1)


def _mixture_rate(alpha: float) -> float:
    # rho^2 x t at which the normal mixture is narrowest at t (Waudby-Smith et al. 2021, appendix B.2, approximated).
    bits = -2 * math.log(alpha)
    return bits + math.log(bits + 1)


def _beta_prior(rate: float, alpha: float, tuned_at: int) -> tuple[float, float]:
    strength = max(1.0, tuned_at / _mixture_rate(alpha))
    return strength * rate, strength * (1 - rate)


def _log_evidence(events: int, n: int, rate: float, alpha: float, tuned_at: int) -> float:
    a, b = _beta_prior(rate, alpha, tuned_at)
    return (
        _log_beta(a + events, b + n - events) - _log_beta(a, b)
        - events * math.log(rate) - (n - events) * math.log1p(-rate)
    )  # fmt: skip


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def _edge(believable: Callable[[float], bool], *, outside: float, inside: float) -> float:
    for _ in range(50):
        middle = (outside + inside) / 2
        outside, inside = (outside, middle) if believable(middle) else (middle, inside)
    return outside
