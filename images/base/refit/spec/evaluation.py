"""The exam, and what a candidate must show in it."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from refit.spec.fields import Count, Positive, Share, Spec, form


class Sampling(Spec):
    """Every parameter is sent with every request: what the engine would default to comes from the model's own files."""

    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: int = -1
    min_p: Share = 0.0
    max_tokens: Count = 32
    repetition_penalty: Positive = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 1


class Gate(Spec):
    """What a candidate must show. Three verdicts: pass, fail, hold; no data is never a pass."""

    min_items: Count = 100
    min_gain: float = form(
        0.0, title="Gain needed", help="The lower end of the interval of candidate minus champion must be above this."
    )
    max_general_loss: Share = 0.1
    min_valid: Share = 0.5
    force: bool = form(
        False,
        title="Drill: ignore the gate",
        help="Lets a candidate through whatever the gate says; it is written down.",
    )


class Evaluate(Spec):
    """The exam: held-out business items and a small general set, both models, in the form they are served in."""

    not_in_fingerprint: ClassVar[frozenset[str]] = frozenset({"gate", "concurrency"})

    max_items: Count = form(300, title="Items", help="Held-out items asked of both models, chosen by a stable hash.")
    labels: tuple[str, ...] = ()
    label_key: str | None = None
    general: bool = True
    sampling: Sampling = Sampling()
    concurrency: Count = 8
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.95
    gate: Gate = Gate()
