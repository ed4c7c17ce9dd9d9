"""The learning rate as a pure function of the step: nothing to save, nothing that can be stepped twice."""

from __future__ import annotations

import math

from refit.spec import Train


def learning_rate(train: Train, step: int) -> float:
    """The rate of optimizer step `step` (from 0): linear warm-up to the peak, then cosine to 0, or constant."""
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / train.warmup_steps
    if train.schedule == "constant":
        return train.learning_rate
    done = (step - train.warmup_steps) / max(1, train.max_steps - train.warmup_steps)
    return train.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
