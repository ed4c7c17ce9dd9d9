"""Who says yes, in which form a model is served, and how it meets users."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from refit.spec.fields import Count, Positive, Share, Spec, form


class FirstChampion(Spec):
    """What there is to beat before the first run: the base model as it is, or one trained for a few steps."""

    kind: Literal["base", "trained"] = "base"
    max_steps: Count = 30


class Promote(Spec):
    """Registration in MLflow, and who says yes."""

    approval: bool = form(
        False, title="Ask a person", help="Wait for an approval in the UI before any user sees the candidate."
    )
    approval_hours: Positive = 24.0
    first_champion: FirstChampion = FirstChampion()


class Serve(Spec):
    """The serving profile: part of the release, since it is part of what users get."""

    engine: Literal["vllm"] = "vllm"
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    max_model_len: Count = 512
    max_num_seqs: Count = 16
    kv_cache_gib: Count = 1
    prefix_caching: bool = True
    eager: bool = True


class Rollout(Spec):
    """How a candidate meets users: shadow first, then these shares, each with a verdict.

    The margins are absolute (0.05 is five points). A step passes when the candidate is proven not worse than the
    champion by more than the margin; it goes back when harm is proven, or at the deadline.
    """

    steps: tuple[Annotated[int, Field(ge=1, le=100)], ...] = form(
        (5, 20, 50, 100), title="Shares", unit="%", help="Share of users at each step, rising, ending in 100."
    )
    shadow_pairs: Annotated[int, Field(ge=0)] = 30
    min_events: Count = form(40, title="Events a side", help="Feedback events each side needs before a verdict.")
    min_seconds: Annotated[float, Field(ge=0)] = 15.0
    deadline_minutes: Positive = form(
        30.0, title="Deadline of a step", unit="minutes", help="No verdict by then: back to the champion."
    )
    margin: Annotated[float, Field(gt=0, le=1)] = 0.05
    alpha: Annotated[float, Field(gt=0, lt=0.5)] = 0.05
    max_error_rate: Share = 0.05
    max_latency_ratio: Positive = 3.0
    stale_seconds: Positive = 60.0
    keep_warm_minutes: Annotated[float, Field(ge=0)] = 10.0

    @field_validator("steps")
    @classmethod
    def _steps_rise_to_all(cls, steps: tuple[int, ...]) -> tuple[int, ...]:
        if not steps or list(steps) != sorted(set(steps)) or steps[-1] != 100:
            raise ValueError(f"steps are {list(steps)}; they must rise and end in 100, as in [5, 20, 50, 100]")
        if len(steps) == 1:
            raise ValueError("steps are [100]; a share below 100 comes first, or nobody is left to compare with")
        return steps
