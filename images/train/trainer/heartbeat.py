"""What the launcher tells of a training that is under way: how far it is, how fast, how long it will take."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from refit import files, log
from refit.job import JobRun
from trainer import prometheus

RECENT_STEPS = 10
"""Speed and time left are told from so many last steps."""


class Heartbeat:
    """Of all launches of a job, `total` steps long; written to its status, its log and its Prometheus file."""

    def __init__(self, run: JobRun, mode: str, total: int) -> None:
        self._run, self._mode, self._total = run, mode, total
        self._every = run.spec.train.heartbeat_seconds
        self._beaten, self._logged = 0.0, -1
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT_STEPS)

    def launch(self) -> None:
        """Ranks start anew: the pace is theirs, and the loss of a step that is taken again is not told."""
        self._recent.clear()

    def stepped(self, record: dict[str, Any]) -> None:
        """Take in rank 0's record of a step."""
        self._recent.append((record["tokens"], record["seconds"]))

    @property
    def has_stepped(self) -> bool:
        """Whether this launch has taken a step."""
        return bool(self._recent)

    def is_due(self) -> bool:
        """Whether it is time; told once."""
        now = time.monotonic()
        if now - self._beaten < self._every:
            return False
        self._beaten = now
        return True

    def beat(self, last: dict[str, Any], resumed_from: int | None) -> None:
        """Tell where the training stands; `last` is the record of its last step, empty before the first."""
        step = int(last.get("step", resumed_from or 0))
        more: dict[str, Any] = {"seconds_left": None, "resumed_from": resumed_from}
        if self._recent:
            tokens, seconds = (sum(column) for column in zip(*self._recent, strict=True))
            more |= {
                "loss": last["loss"], "tokens_per_second": tokens / seconds,
                "seconds_left": seconds / len(self._recent) * (self._total - step),
            }  # fmt: skip
            if step != self._logged:
                self._logged = step
                log.event(
                    "step", done=step, of=self._total, loss=last["loss"],
                    tokens_per_second=more["tokens_per_second"], seconds_left=more["seconds_left"],
                )  # fmt: skip
        self._run.progress(self._mode, step, self._total, **more)
        labels = {"job": self._run.job.id, "pipeline": self._run.job.pipeline, "team": self._run.job.team}
        lines = prometheus.render(labels, last, heartbeat=time.time(), total=self._total)
        files.write(self._run.folder / prometheus.FILE, lines.encode())
