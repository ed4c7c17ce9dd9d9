"""A training's steps as MLflow keeps metrics: value, time and step of each.

A long training has more steps than a curve has points: at most `MOST_STEPS` are kept, the last one always. Times are
those of the steps' own seconds, from the beginning, since records have no clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from refit.job import read_events
from refit.store import join, store_for

METRICS = "metrics.jsonl"
MOST_STEPS = 1000
BATCH = 1000
"""MLflow takes no more metrics in one call."""

KEYS = (
    "loss", "grad_norm", "lr", "seconds", "tokens_per_second", "mfu", "validation_loss", "padding", "duplicates",
    "data", "forward", "backward", "communication", "wait", "optimizer", "validation", "save", "resident",
    "utilisation", "temperature", "power", "device_memory", "device_peak",
)  # fmt: skip


class Point(NamedTuple):
    """One value of a curve; `at` is in milliseconds since the first step began."""

    key: str
    value: float
    at: int
    step: int


def read(output: str) -> list[dict[str, Any]]:
    """The steps of a training by its folder; none where it left none."""
    place = join(output, METRICS)
    store = store_for(place)
    text = store.read(place).decode(errors="replace") if store.exists(place) else ""
    return [record for record in read_events(text) if "step" in record]


def points(records: Sequence[Mapping[str, Any]]) -> list[Point]:
    """The curves of a training; what was not measured, or not finite, is left out."""
    return [point for record, at in _thinned(records) for point in _of(record, at)]


def _thinned(records: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], int]]:
    every = max(1, math.ceil(len(records) / MOST_STEPS))
    passed = 0.0
    for place, record in enumerate(records, start=1):
        passed += float(record.get("seconds", 0.0))
        # A look at the validation split is rare, and none of it is left out.
        if place % every == 0 or place == len(records) or "validation_loss" in record:
            yield record, round(1000 * passed)


def _of(record: Mapping[str, Any], at: int) -> Iterator[Point]:
    for key in KEYS:
        value = record.get(key)
        if isinstance(value, int | float) and math.isfinite(value):
            yield Point(f"train/{key}", float(value), at, int(record["step"]))
    for name, value in record.get("validation_losses", {}).items():
        yield Point(f"train/validation_loss/{_plain(name)}", float(value), at, int(record["step"]))


def _plain(name: str) -> str:
    """A domain as MLflow takes a name."""
    return "".join(one if one.isalnum() or one in "_-. " else "_" for one in name)[:100]
