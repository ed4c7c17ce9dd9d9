"""Every setting of a business line: type, default, bounds, unit, and the sentence a person reads in the form.

This is their only home, a module a stage. The trigger form, the check of a YAML file, `--set` and the documentation are
derived from it (`refit.form`, `refit.pipeline`). A field made with `form(…)` is one of the dozen that people change;
the others are reached by the form's `overrides` object or by `--set`.
"""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from refit.spec.data import (
    Data,
    Decontaminate,
    Dedup,
    Expectations,
    Rule,
    Score,
    ScoreLimits,
    Source,
    Split,
    TokenLimits,
)
from refit.spec.evaluation import Evaluate, Gate, Sampling
from refit.spec.fields import Name, Positive, Spec
from refit.spec.rollout import FirstChampion, Promote, Rollout, Serve
from refit.spec.training import (
    Checkpoint,
    Early,
    Lora,
    Objective,
    Overfit,
    Preference,
    Skip,
    Train,
    Validation,
)

__all__ = [
    "Checkpoint", "Data", "Decontaminate", "Dedup", "Early", "Evaluate", "Expectations", "FirstChampion", "Gate",
    "Lora", "Objective", "Overfit", "Pipeline", "Preference", "Promote", "Rollout", "Rule", "Sampling", "Score",
    "ScoreLimits", "Serve", "Skip", "Source", "Split", "TokenLimits", "Train", "Validation",
]  # fmt: skip


class Pipeline(Spec):
    """A business line: one file in dags/pipelines/."""

    name: Name
    title: str
    description: str = ""
    team: Name
    owner: str
    schedule: str | None = None
    on_new_data: bool = True
    timeout_hours: Positive = 24.0
    data: Data
    train: Train
    evaluate: Evaluate = Evaluate()
    promote: Promote = Promote()
    serve: Serve = Serve()
    rollout: Rollout = Rollout()

    @model_validator(mode="after")
    def _sources_suit_the_objective(self) -> Self:
        objective = self.train.objective
        if objective == "sft":
            return self
        kind, what = ("text", "plain texts") if objective == "pretrain" else ("preference", "preference pairs")
        # Not "auto" either: a conversation beside a pair of the same words would be what stays of the two.
        wrong = [f"{one.name} ({one.format})" for one in self.data.sources if one.format != kind]
        if wrong:
            raise ValueError(
                f"train.objective is {objective}, which learns from {what}, and these sources may hold something else: "
                f"{', '.join(wrong)}; give each source format: {kind}, or set train.objective to sft"
            )
        if objective == "pretrain" and self.data.split.heldout:
            raise ValueError(
                f"train.objective is pretrain and data.split.heldout is {self.data.split.heldout:g}; plain texts are "
                "never held out, they cannot be asked. Set data.split.heldout to 0"
            )
        return self
