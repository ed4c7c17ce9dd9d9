"""The jobs of this image: plan, smoke, train. Each is a handler: a running job in, its manifest out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from refit import log
from refit.job import Handler, JobRun
from refit.manifest import Manifest, describe
from refit.store import join, store_for
from trainer import metrics, writer
from trainer.inputs import Inputs, locate
from trainer.launcher import Launcher
from trainer.machine import arithmetic
from trainer.packs import Packs

PLAN = "plan.json"


def plan(run: JobRun) -> Manifest:
    """Say what the training will take, before anything is started."""
    from trainer import plan as planning  # transformers, for the shapes; a resume does not need it

    inputs = locate(run.job)
    made = planning.make(
        run.spec.train, inputs.base, Packs.of(inputs.dataset), smoke=smoke_facts(run, inputs.fingerprint)
    )
    planning.show(made)
    store_for(run.job.output).write(join(run.job.output, PLAN), json.dumps(made, indent=1).encode())
    return _manifest("plan", inputs, facts=made)


def smoke(run: JobRun) -> Manifest:
    """A few steps with a save and a restore: does it work here, and how fast?"""
    inputs = locate(run.job)
    with writer.sole(run.folder, run.job.output) as token:
        facts = Launcher(run, inputs, mode="smoke", dtype=arithmetic(run.spec.train), token=token).supervise()
    return _manifest("smoke", inputs, facts=facts)


def train(run: JobRun) -> Manifest:
    """Train to the end, from wherever an earlier attempt came to, and publish the model."""
    inputs = locate(run.job)
    with writer.sole(run.folder, run.job.output) as token:
        launcher = Launcher(run, inputs, mode="train", dtype=arithmetic(run.spec.train), token=token)
        result = launcher.supervise()
        export = run.folder / "export"
        records = metrics.read(run.folder)
        tokens, steps = sum(record["tokens"] for record in records), len(records)
        facts = {"steps": steps, "loss": records[-1]["loss"], "tokens": tokens, "pipeline": run.spec.name}
        model = _publish(export / "model", "model", inputs, facts, join(run.job.store, "models"))
        outputs = {"model": model[0]}
        if (export / "adapter").is_dir():
            uri = join(run.job.output, "adapter")
            store_for(uri).remove(uri)  # of an attempt that was killed before its manifest
            outputs["adapter"] = _publish(export / "adapter", "adapter", inputs, facts, None, uri)[0]
        shutil.rmtree(export)
        metrics.upload(run.folder, run.job.output)
    log.event("published", model=model[0])
    return _manifest(
        "train", inputs, outputs=outputs,
        facts={
            **facts, **result, "model_digest": model[1], "resumed_from": launcher.resumed_from,
            "seconds": sum(record["seconds"] for record in records), "recipe": run.spec.train.model_dump(mode="json"),
        },
    )  # fmt: skip


HANDLERS: dict[str, Handler] = {"plan": plan, "smoke": smoke, "train": train}


def smoke_uri(run: JobRun, fingerprint: str) -> str:
    """Where the smoke run of a training lies."""
    return join(run.job.store, "training", run.spec.name, f"smoke-{fingerprint}")


def smoke_facts(run: JobRun, fingerprint: str) -> dict[str, Any] | None:
    """What the smoke run measured; None where there was none yet."""
    uri = smoke_uri(run, fingerprint)
    manifest = store_for(uri).manifest(uri)
    return manifest.facts if manifest else None


def _publish(
    folder: Path, kind: str, inputs: Inputs, facts: dict[str, Any], parent: str | None, uri: str | None = None
) -> tuple[str, str]:
    """Commit a folder, at `uri` or below `parent` by its content; returns its address and digest."""
    manifest = Manifest(
        kind=kind, fingerprint=inputs.fingerprint, facts=facts, files=describe(folder),
        inputs={"dataset": inputs.dataset_digest, "base": inputs.base_digest},
    )  # fmt: skip
    digest = manifest.content_digest()
    uri = uri or join(str(parent), digest[:32])
    with store_for(uri).publish(uri) as draft:
        for path in folder.iterdir():
            shutil.move(path, draft.path / path.name)
        draft.commit(manifest)
    return uri, digest


def _manifest(kind: str, inputs: Inputs, *, facts: dict[str, Any], outputs: dict[str, str] | None = None) -> Manifest:
    return Manifest(
        kind=kind, fingerprint=inputs.fingerprint, facts=facts, outputs=outputs or {},
        inputs={"dataset": inputs.dataset_digest, "base": inputs.base_digest},
    )  # fmt: skip
