"""The gate: pass, fail or hold, with its reasons in words. No data is never a pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from evaluator.pairs import Pair
from refit.spec import Gate
from refit.statistics import Interval


class Outcome(StrEnum):
    """What the gate says: proven better, measured and not so, or not measured well enough to know."""

    PASS = "pass"
    FAIL = "fail"
    HOLD = "hold"


@dataclass(frozen=True)
class Decision:
    """The verdict and why. `forced` where the spec's drill let through what `measured` would not have."""

    verdict: Outcome
    measured: Outcome
    reasons: tuple[str, ...]

    @property
    def forced(self) -> bool:
        """Whether the gate was overruled."""
        return self.verdict is not self.measured

    @property
    def why(self) -> str:
        """The reasons as one text."""
        text = "; ".join(self.reasons)
        return f"forced through (the gate said {self.measured}): {text}" if self.forced else text


def decide(
    gate: Gate, *, business: Pair, valid: Pair, general: Pair | None, faults: Sequence[str], general_asked: bool
) -> Decision:
    """The verdict on a candidate.

    Args:
        gate: what is asked of it.
        business: the accuracy of both on the business items.
        valid: the share of readable answers.
        general: the general set, None where neither answered it.
        faults: what keeps the two from being comparable.
        general_asked: whether the spec wants a general set at all.
    """
    holds = [*faults, *_unmeasured(gate, business, general, general_asked)]
    fails = [] if holds else [*_not_better(gate, business), *_not_valid(gate, valid), *_broken(gate, general)]
    unsure = [] if holds or fails else _maybe_broken(gate, general)
    if holds or unsure:
        measured, reasons = Outcome.HOLD, [*holds, *unsure]
    elif fails:
        measured, reasons = Outcome.FAIL, fails
    else:
        measured, reasons = Outcome.PASS, [f"proven better on {business.items} items: {points(business.difference)}"]
    return Decision(Outcome.PASS if gate.force else measured, measured, tuple(reasons))


def points(interval: Interval) -> str:
    """A difference of shares in words: "+12.3 points (+8.0 to +16.5)"."""
    return f"{interval.value * 100:+.1f} points ({interval.low * 100:+.1f} to {interval.high * 100:+.1f})"


def _unmeasured(gate: Gate, business: Pair, general: Pair | None, general_asked: bool) -> list[str]:
    reasons = []
    if business.items < gate.min_items:
        reasons.append(f"only {business.items} items were answered by both; the gate asks for {gate.min_items}")
    if business.items and not business.difference.known:
        reasons.append("scores of the business set are missing (NaN)")
    if general_asked and general is None:
        reasons.append("the general set was not answered, and the spec asks for it")
    if general is not None and general.items and not general.difference.known:
        reasons.append("scores of the general set are missing (NaN)")
    return reasons


def _not_better(gate: Gate, business: Pair) -> list[str]:
    if business.difference.low > gate.min_gain:
        return []
    said = "worse" if business.difference.high < 0 else "not proven better"
    needed = f"the lower end must be above {gate.min_gain * 100:g}"
    return [f"{said} on {business.items} items: {points(business.difference)}; {needed}"]


def _not_valid(gate: Gate, valid: Pair) -> list[str]:
    # Written so that NaN does not get through either.
    if valid.candidate.value >= gate.min_valid:
        return []
    said = f"only {valid.candidate.value * 100:.0f} % of its answers can be read"
    return [f"{said}; the gate asks for {gate.min_valid * 100:g} %"]


def _broken(gate: Gate, general: Pair | None) -> list[str]:
    if general is None or general.difference.value >= -gate.max_general_loss or general.difference.high >= 0:
        return []
    return [f"the general set got worse: {points(general.difference)}; {gate.max_general_loss * 100:g} are tolerated"]


def _maybe_broken(gate: Gate, general: Pair | None) -> list[str]:
    # Lost more than is tolerated, yet so few items that it may be chance: nobody knows, so nothing moves.
    if general is None or general.difference.value >= -gate.max_general_loss:
        return []
    return [
        f"the general set may have got worse: {points(general.difference)}; "
        f"{gate.max_general_loss * 100:g} are tolerated, and {general.items} items cannot tell it from chance"
    ]
