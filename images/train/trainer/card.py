"""A model's card: what it was made from and how, in a page that a person reads beside the weights. Facts only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from refit.job import Job
from refit.store import join, store_for

CARD = "README.md"

Evaluation = tuple[str, dict[str, Any]] | None
"""Address and facts of an evaluation, or none."""

_LICENCES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE", "COPYING")


def render(
    job: Job, facts: dict[str, Any], *, base_digest: str, dataset_digest: str, dataset_fingerprint: str,
    warm_start_digest: str | None = None, licence: str | None = None, evaluation: Evaluation = None,
) -> str:  # fmt: skip
    """The card. `facts` are the model's: steps, loss, tokens (what is not known is left out)."""
    train = job.spec.train
    recipe = [
        f"{train.method}{f' (rank {train.lora.rank}, alpha {train.lora.alpha:g})' if train.method != 'full' else ''}",
        f"learning rate {train.learning_rate:g} ({train.schedule}, {train.warmup_steps} steps of warm-up)",
        f"{train.micro_batch * train.accumulation} packs a step", f"ZeRO {train.zero_stage}", f"seed {train.seed}",
    ]  # fmt: skip
    rows = [
        ("base model", f"`{job.inputs.get('base') or train.base}` (content `{base_digest[:32]}`)"),
        ("begun with", f"`{train.warm_start}` (content `{warm_start_digest[:32]}`)" if warm_start_digest else None),
        ("data set", f"`{job.inputs['dataset']}` (fingerprint `{dataset_fingerprint}`, content "
                     f"`{dataset_digest[:32]}`)"),
        ("recipe", ", ".join(recipe)),
        ("steps", f"{facts['steps']:,} of {train.max_steps:,}"),
        ("tokens seen", f"{facts['tokens']:,}" if facts.get("tokens") else None),
        ("loss of the last step", f"{facts['loss']:.4g}" if facts.get("loss") is not None else None),
        ("evaluation", _evaluation(evaluation)),
        ("licence of the base model", licence),
        ("owner", f"{job.team}, {job.owner}"),
    ]  # fmt: skip
    table = "\n".join(f"| {name} | {value.replace('|', '/')} |" for name, value in rows if value)
    return f"# {job.spec.title}\n\n`{job.pipeline}`, trained with Refit.\n\n| | |\n|---|---|\n{table}\n"


def licence_of(base: Path) -> str | None:
    """The first line of the licence in a base model's folder; None where there is none."""
    for name in _LICENCES:
        path = base / name
        if path.is_file():
            lines = (line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines())
            return next((line for line in lines if line), None)
    return None


def evaluation_of(job: Job, digest: str) -> Evaluation:
    """The newest evaluation of a model, by its digest, in the store of a training; None where there is none."""
    folder = join(job.store, "evaluations", job.pipeline)
    store = store_for(folder)
    found = []
    for name in store.children(folder):
        manifest = store.manifest(join(folder, name))
        if manifest and manifest.kind == "evaluation" and manifest.facts.get("model_digest") == digest:
            found.append((manifest.created, join(folder, name), manifest.facts))
    if not found:
        return None
    _, uri, facts = max(found, key=lambda one: one[0])
    return uri, facts


def _evaluation(evaluation: Evaluation) -> str | None:
    if evaluation is None:
        return None
    uri, facts = evaluation
    accuracy = facts.get("accuracy") or {}
    told = [f"{facts['items']} items"] if facts.get("items") else []
    if accuracy.get("value") is not None:
        told.append(f"accuracy {accuracy['value']:.3f}")
        if accuracy.get("low") is not None and accuracy.get("high") is not None:
            told[-1] += f" ({accuracy['low']:.3f} to {accuracy['high']:.3f})"
    return ", ".join([*told, f"`{uri}`"])
