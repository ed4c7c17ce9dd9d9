"""The jobs of this image: plan, smoke, train. Each is a handler: a running job in, its manifest out."""

from __future__ import annotations

import json
import shutil
from typing import Any

from refit import log
from refit.job import Handler, JobRun, read_events
from refit.manifest import Manifest
from refit.store import join, store_for
from trainer import metrics, writer
from trainer import scene as scenes
from trainer.inputs import Inputs, locate
from trainer.launcher import Launcher
from trainer.machine import arithmetic
from trainer.packs import Packs
from trainer.publishing import lay_card, publish

PLAN = "plan.json"


def plan(run: JobRun) -> Manifest:
    """Say what the training will take, before anything is started."""
    from trainer import plan as planning  # transformers, for the shapes; a resume does not need it

    inputs = locate(run.job)
    made = planning.make(
        run.spec.train,
        inputs.base,
        Packs.of(inputs.dataset, run.spec.train),
        smoke=smoke_facts(run, inputs.fingerprint),
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
        model = publish(export / "model", "model", inputs, facts, below=join(run.job.store, "models"))
        lay_card(model[0], run.job, inputs, facts)
        outputs = {"model": model[0]}
        if (export / "adapter").is_dir():
            uri = join(run.job.output, "adapter")
            store_for(uri).remove(uri)  # of an attempt that was killed before its manifest
            outputs["adapter"] = publish(export / "adapter", "adapter", inputs, facts, uri=uri)[0]
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


def replay(run: JobRun) -> Manifest:
    """Take a step again that a training gave up; options: `of`, the training's folder.

    Raises:
        BadInput: that training gave no step up.
    """
    output = str(run.job.options["of"])
    scene, inputs = scenes.read(output), locate(run.job)
    with writer.sole(run.folder, run.job.output) as token:
        launcher = Launcher(run, inputs, mode="replay", dtype=arithmetic(run.spec.train), token=token, scene=scene)
        found = launcher.supervise()
    before = {record["step"]: record["loss"] for record in read_events(_metrics(output))}
    first = launcher.resumed_from or 0
    exact = found.pop("losses") == [before.get(step) for step in range(first + 1, scene.step)]
    return _manifest("replay", inputs, facts={"step": scene.step, "why": scene.why, "exact": exact, **found})


def _metrics(output: str) -> str:
    store, place = store_for(output), join(output, metrics.METRICS)
    return store.read(place).decode(errors="replace") if store.exists(place) else ""


HANDLERS: dict[str, Handler] = {"plan": plan, "smoke": smoke, "train": train, "replay": replay}


def smoke_uri(run: JobRun, fingerprint: str) -> str:
    """Where the smoke run of a training lies."""
    return join(run.job.store, "training", run.spec.name, f"smoke-{fingerprint}")


def smoke_facts(run: JobRun, fingerprint: str) -> dict[str, Any] | None:
    """What the smoke run measured; None where there was none yet."""
    uri = smoke_uri(run, fingerprint)
    manifest = store_for(uri).manifest(uri)
    return manifest.facts if manifest else None


def _manifest(kind: str, inputs: Inputs, *, facts: dict[str, Any], outputs: dict[str, str] | None = None) -> Manifest:
    return Manifest(
        kind=kind, fingerprint=inputs.fingerprint, facts=facts, outputs=outputs or {},
        inputs={"dataset": inputs.dataset_digest, "base": inputs.base_digest},
    )  # fmt: skip
