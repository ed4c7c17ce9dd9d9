"""A training's steps as MLflow keeps metrics: value, time and step of each.

A long training has more steps than a curve has points: about `MOST_STEPS` are kept, and the last one, looks at the
validation split and skipped steps always. Times are those of the steps' own seconds, from the beginning, since records
have no clock.
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
    "utilisation", "temperature", "power", "device_memory", "device_peak", "skips",
    "reward_chosen", "reward_rejected", "reward_margin", "preference_accuracy",
    "validation_reward_chosen", "validation_reward_rejected", "validation_reward_margin",
    "validation_preference_accuracy",
)  # fmt: skip

ALWAYS = "train/seconds"
"""A curve with a point of each step that is kept at all."""

LOOK, LOOKS = "train/validation_loss", "train/validation_"
"""The curve of the looks at the validation split, and how the names of all that they find begin."""

RARE = frozenset({"validation_loss", "skips"})
"""What a record has at few steps, of which none is left out."""


class Point(NamedTuple):
    """One value of a curve; `at` is in milliseconds since the first step began."""

    key: str
    value: float
    at: int
    step: int


class Growing:
    """The curves of a training that may still be at work; `logged` is the last step that is known to be kept, `looked`
    the last look: one that a stop cut short comes later than its step.

    Args:
        output: the training's folder.
        steps: how many it takes, if it takes all.
    """

    def __init__(self, output: str, steps: int) -> None:
        self.logged = self.looked = 0
        self._place = join(output, METRICS)
        self._every = math.ceil(steps / MOST_STEPS)
        self._read = b""  # the last line that was taken in
        self._size, self._passed = 0, 0.0
        self._waiting: list[tuple[dict[str, Any], int]] = []
        self._last: tuple[dict[str, Any], int] | None = None

    def batches(self, *, ended: bool = False) -> Iterator[list[Point]]:
        """The points that are not kept yet, whole steps, as many as MLflow takes at once; the caller says `keep`."""
        self._take_in()
        if ended and self._last is not None and self._last not in self._waiting:
            self._waiting.append(self._last)
        batch: list[Point] = []
        self._waiting = [(record, at) for record, at in self._waiting if self._new(record, at)]
        for record, at in self._waiting:
            found = self._new(record, at)
            if batch and len(batch) + len(found) > BATCH:
                yield batch
                batch = []
            batch += found
        if batch:
            yield batch

    def keep(self, points: Sequence[Point]) -> None:
        """These are kept."""
        self.logged = max(self.logged, *(point.step for point in points))
        self.looked = max(self.looked, *(point.step for point in points if point.key.startswith(LOOKS)), 0)

    def _new(self, record: dict[str, Any], at: int) -> list[Point]:
        return [
            point for point in _of(record, at)
            if point.step > (self.looked if point.key.startswith(LOOKS) else self.logged)
        ]  # fmt: skip

    def _take_in(self) -> None:
        """Read what was appended; all of it where a resume has taken steps back."""
        store = store_for(self._place)
        data = store.read(self._place) if store.exists(self._place) else b""
        data = data[: data.rfind(b"\n") + 1]  # a line that is being written is for the next time
        if self._size > len(data) or data[self._size - len(self._read) : self._size] != self._read:
            self._size, self._passed, self._waiting, self._last = 0, 0.0, [], None
        for record in read_events(data[self._size :].decode(errors="replace")):
            if "step" not in record:
                continue
            self._passed += float(record.get("seconds", 0.0))
            self._last = (record, round(1000 * self._passed))
            if record["step"] % self._every == 0 or not RARE.isdisjoint(record):
                self._waiting.append(self._last)
        self._size = len(data)
        self._read = data[data.rfind(b"\n", 0, -1) + 1 :]


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
