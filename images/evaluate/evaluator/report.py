"""report.html: one page, by itself, that a business owner reads and an engineer can check."""

from __future__ import annotations

import json
import math
from functools import cache
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from evaluator import plots
from evaluator.compare import Comparison
from evaluator.gate import Outcome
from evaluator.pairs import Pair, Row
from refit.statistics import Interval

EXAMPLES = 10
CLIP = 600

HEADLINES = {
    Outcome.PASS: "The candidate is better",
    Outcome.FAIL: "The candidate stays out",
    Outcome.HOLD: "No decision: not measured well enough",
}
FORCED = "Let through by a drill"


def render(comparison: Comparison) -> str:
    """The page. Everything that comes from data, models or the spec is escaped by the template."""
    names = labels(comparison)
    matrices = [
        ("Candidate", plots.confusion(comparison.business.candidate.confusion(), names, "candidate", plots.CANDIDATE)),
        ("Champion", plots.confusion(comparison.business.champion.confusion(), names, "champion", "#5b6675")),
    ]
    pair = comparison.correct
    better, worse = examples(comparison)
    return _template().render(
        it=comparison,
        spec=comparison.spec,
        headline=FORCED if comparison.decision.forced else HEADLINES[comparison.decision.verdict],
        tone="hold" if comparison.decision.forced else comparison.decision.verdict.value,
        sentence=sentence(pair),
        scores=Markup(plots.scores(pair, ("Candidate", "Champion"))) if pair.items else None,
        difference=Markup(plots.difference(pair, comparison.spec.evaluate.gate.min_gain))
        if pair.difference.known
        else None,
        domains=Markup(plots.domains(comparison.domains)) if comparison.domains else None,
        matrices=[(title, Markup(svg)) for title, svg in matrices] if names and pair.items else [],
        better=better,
        worse=worse,
        colours={"candidate": plots.CANDIDATE, "champion": plots.CHAMPION},
    )


def sentence(pair: Pair) -> str:
    """The result in one plain sentence."""
    if not pair.items or not pair.difference.known:
        return "There are no answers that could be put beside each other."
    change = f"{pair.gained} answers became right and {pair.lost} became wrong"
    return (
        f"Of {pair.items} held-out questions the candidate answers {pair.candidate.value * 100:.0f} % rightly and the "
        f"champion {pair.champion.value * 100:.0f} %: {change}."
    )


def labels(comparison: Comparison) -> list[str]:
    """The labels in the order of the spec; those of the items where it names none."""
    asked = sorted({row["label"] for row in comparison.business.champion.rows if row["label"] is not None})
    given = list(comparison.spec.evaluate.labels)
    return given + [label for label in asked if label not in given]


def examples(comparison: Comparison) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Items that became right and items that became wrong, half of each where there are enough of both.

    They are the first in the exam's order, which is by hash: arbitrary, and not picked by anyone.
    """
    better, worse = (comparison.business.changed("correct", better=side) for side in (True, False))
    half = EXAMPLES // 2
    shown_better = better[: max(half, EXAMPLES - len(worse))]
    shown_worse = worse[: max(half, EXAMPLES - len(better))]
    return [_example(new, old) for new, old in shown_better], [_example(new, old) for new, old in shown_worse]


def _example(new: Row, old: Row) -> dict[str, Any]:
    messages = json.loads(new["messages"])
    question = next((message["content"] for message in reversed(messages) if message["role"] == "user"), "")
    return {
        "domain": new["domain"], "question": _clip(str(question)), "reference": _clip(new["reference"]),
        "candidate": _said(new), "champion": _said(old),
    }  # fmt: skip


def _said(row: Row) -> str:
    return f"(refused: {_clip(row['refused'])})" if row["refused"] else _clip(row["answer"])


def _clip(text: str) -> str:
    return text if len(text) <= CLIP else text[:CLIP] + " …"


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters["percent"] = lambda x: f"{x * 100:.1f} %" if _finite(x) else "–"
    environment.filters["points"] = lambda x: f"{x * 100:+.1f}" if _finite(x) else "–"
    environment.filters["interval"] = _interval
    text = resources.files("evaluator").joinpath("report.html.jinja").read_text(encoding="utf-8")
    return environment.from_string(text)


def _interval(interval: Interval, form: str) -> str:
    if not interval.known:
        return "not measured"
    low, high = (f"{x * 100:+.1f}" if form == "points" else f"{x * 100:.1f} %" for x in (interval.low, interval.high))
    return f"{low} to {high}"


def _finite(number: float | None) -> bool:
    return number is not None and math.isfinite(number)
