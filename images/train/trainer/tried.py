"""What is tried before a training, how long that may take, and what was found out before.

An answer counts for the same training, shared out and tried in the same way by the same software on the same kind of
machine; then it is named so, and found again. What changes from hour to hour is preflight's, which is never answered
from here.
"""

from __future__ import annotations

from typing import Any

from refit import fingerprint
from refit.job import Job
from refit.manifest import MANIFEST, Manifest
from refit.progress import duration
from refit.spec import Train
from refit.store import join, store_for
from trainer import gpus
from trainer.machine import arithmetic, cores, processor
from trainer.reports import versions
from trainer.task import Mode

OVERFIT, SMOKE = "overfit", "smoke"

LOOK = "the first look at the validation split"
"""The phase of a smoke run in which training never was before: much memory, other code."""


def parts(train: Train) -> tuple[str, ...]:
    """What the spec asks for, in its order; a handful is of what has one right answer, which a pair has not."""
    return (OVERFIT, SMOKE) if train.overfit.steps and not train.of_pairs else (SMOKE,)


def minutes(mode: Mode, train: Train, planned: float | None = None) -> float | None:
    """How long the ranks may take in all; None where nobody says. `planned` is what the training takes, in seconds.

    A handful keeps to a tenth of the training's micro batches by itself. Three steps of a long training are as little,
    and may take an hour.
    """
    smoke = max(train.smoke_minutes, train.smoke_share * (planned or 0.0) / 60)
    limits = {OVERFIT: 2 * train.overfit.minutes, SMOKE: smoke}  # the ranks keep the former themselves
    return sum(limits.values()) if mode == "trial" else limits.get(mode)


def blind(train: Train, how: str) -> str:
    """What is said where the first look fails."""
    return (
        f"{LOOK} failed after the smoke run's {train.smoke_steps} step(s): {how}. The training would have ended there, "
        f"at step {train.validation.every_steps}. If it is memory, lower train.micro_batch or data.pack_length; else "
        "look at the validation split."
    )


def too_slow(mode: Mode, train: Train, limit: float) -> str:
    """What is said where a trial takes too long."""
    what = {OVERFIT: "to learn a handful of packs", SMOKE: f"{train.smoke_steps} steps"}.get(mode, "what is tried")
    return (
        f"{what} took more than {limit:g} minutes. Use more ranks or a smaller model, or raise train.smoke_minutes or "
        "train.overfit.minutes."
    )


def name(part: str, train: Train, training: str) -> str:
    """The name of an answer about the training of that fingerprint, here; 32 hex characters."""
    how = {OVERFIT: train.overfit, SMOKE: {"steps": train.smoke_steps, "validation": train.validation}}[part]
    here = {
        "processor": processor(), "cores": cores(), "dtype": arithmetic(train), "versions": versions(),
        "layout": fingerprint.layout(train),
    }  # fmt: skip
    if train.gpus_per_node > 0:
        here["cards"] = [gpu.name for gpu in gpus.look().gpus]
    return fingerprint.digest({"training": training, "part": part, "how": how, "here": here})[:32]


def uri(part: str, job: Job, training: str) -> str:
    """Where the answer lies."""
    return join(job.store, "training", job.pipeline, f"{part}-{name(part, job.spec.train, training)}")


def told(part: str, facts: dict[str, Any], train: Train) -> str:
    """An answer in a few words."""
    if part == OVERFIT:
        end = "learnt by heart" if facts["learnt"] else "not judged, the budget was over"
        return f"loss {facts['losses'][0]:.3g} → {facts['losses'][-1]:.3g} in {facts['steps']} step(s), {end}"
    seconds = facts["seconds_per_step"]
    whole = f"{train.max_steps} steps in about {duration(seconds * train.max_steps)}"
    return f"{seconds:.3g} s a step, {whole}; saved and restored to the bit"


def known(part: str, job: Job, training: str) -> dict[str, Any] | None:
    """What was found out before; None where nobody tried."""
    place = uri(part, job, training)
    manifest = store_for(place).manifest(place)
    return manifest.facts if manifest else None


def keep(part: str, job: Job, manifest: Manifest) -> None:
    """Have an answer found again."""
    place = uri(part, job, manifest.fingerprint)
    store_for(place).write(join(place, MANIFEST), manifest.model_dump_json(indent=1).encode())
