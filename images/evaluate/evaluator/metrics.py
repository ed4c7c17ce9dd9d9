"""Metrics: what is measured of an answer. Each is a pure function of item and answer, 0 or 1.

Adding one is a function here and a test; it gets a column in answers.parquet and an interval in the facts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from evaluator.exam import Item
from refit.spec import Evaluate

Metric = Callable[[Item, str, Evaluate], bool]
METRICS: dict[str, Metric] = {}


def metric(function: Metric) -> Metric:
    """Register a metric under its own name."""
    METRICS[function.__name__] = function
    return function


@metric
def correct(item: Item, answer: str, spec: Evaluate) -> bool:
    """The right label, the right text where there are no labels, or a passed check."""
    if item.check is not None:
        return passes(item.check, answer)
    if spec.label_key is None:
        return answer.strip() == item.reference.strip()
    return item.label is not None and predicted_label(answer, spec) == item.label


@metric
def valid(item: Item, answer: str, spec: Evaluate) -> bool:
    """An answer that the program behind it can read: JSON with the key, and one of the labels in it."""
    if item.check is not None or spec.label_key is None:
        return bool(answer.strip())
    label = predicted_label(answer, spec)
    return label is not None and (not spec.labels or label in spec.labels)


def predicted_label(answer: str, spec: Evaluate) -> str | None:
    """The label in an answer; None where the whole of it is not one JSON object with the key and a text.

    No mercy for text around the JSON: the program that reads the answers in production has none either.
    """
    if spec.label_key is None:
        return None
    try:
        value = json.loads(answer)
    except (ValueError, RecursionError):
        return None
    label = value.get(spec.label_key) if isinstance(value, dict) else None
    return label if isinstance(label, str) else None


def passes(check: Mapping[str, Any], answer: str) -> bool:
    """Whether an answer passes a general item's check.

    exact: equal but for case, blanks, and marks around it. contains: every word given occurs as a word, in any case.
    regex: found in the answer, stripped of blanks around it.
    """
    [(kind, wanted)] = check.items()
    if kind == "exact":
        return _plain(answer) == _plain(wanted)
    if kind == "contains":
        return all(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", answer, re.IGNORECASE) for word in wanted)
    if kind == "regex":
        return re.search(wanted, answer.strip()) is not None
    raise ValueError(f"unknown check {kind!r}; known are exact, contains, regex")


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).strip(" .!\"'`*")
