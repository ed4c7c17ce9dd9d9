"""The jobs of this image: plan, what is tried, train. Each is a handler: a running job in, its manifest out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from refit import log
from refit.errors import BadInput
from refit.job import Handler, JobRun, read_events
from refit.manifest import Manifest
from refit.progress import paced
from refit.states import State
from refit.store import Heard, join, store_for
from trainer import checkpoints, metrics, tried, warm, writer
from trainer import scene as scenes
from trainer.inputs import Inputs, locate
from trainer.launcher import Launcher
from trainer.machine import arithmetic
from trainer.packs import Packs
from trainer.publishing import lay_card, publish
from trainer.task import Mode

PLAN = "plan.json"


def plan(run: JobRun) -> Manifest:
    """Say what the training will take, before anything is started."""
    from trainer import plan as planning  # transformers, for the shapes; a resume does not need it

    inputs = _locate(run)
    measured = tried.known(tried.SMOKE, run.job, inputs.fingerprint)
    made = planning.make(run.spec.train, inputs.base, Packs.of(inputs.dataset, run.spec.train), smoke=measured)
    planning.show(made)
    writer.sign(run.job)
    store_for(run.job.output).write(join(run.job.output, PLAN), json.dumps(made, indent=1).encode())
    return _manifest("plan", inputs, facts=made)


def preflight(run: JobRun) -> Manifest:
    """Is every rank's place fit for the training?"""
    inputs = _locate(run)
    return _manifest("preflight", inputs, facts=_look(run, inputs, _planned(run, inputs)))


def overfit(run: JobRun) -> Manifest:
    """Learn a handful of packs by heart: can the training learn at all?"""
    return _one_part(run, tried.OVERFIT)


def smoke(run: JobRun) -> Manifest:
    """A few steps with a save and a restore: does it work here, and how fast?"""
    return _one_part(run, tried.SMOKE)


def trial(run: JobRun) -> Manifest:
    """All that comes before a training: preflight, a handful learnt by heart, a smoke run.

    Preflight looks each time. The other two are answered from the store where they are known; what is not is tried by
    one set of ranks, and kept for the next time.
    """
    inputs = _locate(run)
    planned = _planned(run, inputs)
    looked = _look(run, inputs, planned)
    run.event(State.RUNNING, f"preflight: {len(looked['ranks'])} rank(s) fit, {len(looked['checks'])} checks")
    wanted = tried.parts(run.spec.train)
    known = {part: tried.known(part, run.job, inputs.fingerprint) for part in wanted}
    new = tuple(part for part in wanted if known[part] is None)
    found = _try(run, inputs, new, planned["seconds"])
    for part in wanted:
        said = tried.told(part, known[part] or found[part], run.spec.train)
        run.event(State.RUNNING, f"{part}: {said}{'' if part in new else ' (known)'}")
    facts = {part: {**(known[part] or found[part]), "known": part not in new} for part in wanted}
    return _manifest("trial", inputs, facts={"preflight": looked, **facts})


def _planned(run: JobRun, inputs: Inputs) -> dict[str, Any]:
    """The plan of a training: the one that the input `plan` names, or one made here."""
    uri = run.job.inputs.get("plan")
    if uri:
        return store_for(uri).require(uri, "plan").facts
    from trainer import plan as planning

    return planning.make(run.spec.train, inputs.base, Packs.of(inputs.dataset, run.spec.train))


def _look(run: JobRun, inputs: Inputs, planned: dict[str, Any]) -> dict[str, Any]:
    """The preflight of a training by its plan."""
    from trainer import preflight as looking

    train = run.spec.train
    output = join(run.job.store, "training", run.job.pipeline, inputs.fingerprint)
    return looking.preflight(train, planned, output)


def _one_part(run: JobRun, part: str) -> Manifest:
    inputs = _locate(run)
    planned = _planned(run, inputs)["seconds"] if "plan" in run.job.inputs else None
    return _manifest(part, inputs, facts=_try(run, inputs, (part,), planned)[part])


def _try(run: JobRun, inputs: Inputs, parts: tuple[str, ...], planned: float | None) -> dict[str, dict[str, Any]]:
    """Try these parts, and keep what is found out; `planned` is how many seconds the training takes."""
    if not parts:
        return {}
    mode: Mode = "trial" if len(parts) > 1 else "overfit" if tried.OVERFIT in parts else "smoke"
    with _sole(run) as token:
        found = Launcher(
            run, inputs, mode=mode, dtype=arithmetic(run.spec.train), token=token, planned=planned
        ).supervise()
    answers: dict[str, dict[str, Any]] = found if mode == "trial" else {parts[0]: found}
    for part, facts in answers.items():
        tried.keep(part, run.job, _manifest(part, inputs, facts=facts))
    return answers


def train(run: JobRun) -> Manifest:
    """Train to the end, from wherever an earlier attempt came to, and publish the model."""
    inputs = _locate(run)
    with _sole(run) as token:
        launcher = Launcher(run, inputs, mode="train", dtype=arithmetic(run.spec.train), token=token)
        result = launcher.supervise()
        export = run.folder / "export"
        records = metrics.read(run.folder)
        tokens, steps = sum(record["tokens"] for record in records), len(records)
        facts = {"steps": steps, "loss": _last_loss(records), "tokens": tokens, "pipeline": run.spec.name}
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


def early(run: JobRun) -> Manifest:
    """Compare a checkpoint of a training that goes on with its base model; options: `checkpoint`, its address.

    Raises:
        BadInput: it is not whole, or of another training.
    """
    from trainer.republish import launch, task_of

    inputs, beat = _locate(run), _beats(run, "early")
    beat()  # hashing a large checkpoint takes its time, from here
    found = checkpoints.verify(str(run.job.options.get("checkpoint")), beat)
    warm.verified(run.spec.train, inputs.warm_start, beat)
    if inputs.fingerprint != found.manifest.fingerprint:
        raise BadInput(f"{found.uri}: of training {found.manifest.fingerprint}, this one is {inputs.fingerprint}.")
    facts = launch(task_of(run.job, inputs, found, run.folder, "early"), beat)
    return _manifest("early", inputs, facts={"step": found.step, "checkpoint": found.uri, **facts})


def replay(run: JobRun) -> Manifest:
    """Take a step again that a training gave up; options: `of`, the training's folder, `step`, if it skipped it.

    Raises:
        BadInput: that training gave no step up.
    """
    output = str(run.job.options["of"])
    scene, inputs = scenes.read(output, run.job.options.get("step")), _locate(run)
    with _sole(run) as token:
        launcher = Launcher(run, inputs, mode="replay", dtype=arithmetic(run.spec.train), token=token, scene=scene)
        found = launcher.supervise()
    before = {record["step"]: record["loss"] for record in read_events(_metrics(output))}
    first = launcher.resumed_from or 0
    exact = found.pop("losses") == [before.get(step) for step in range(first + 1, scene.step)]
    random = tuple(found.pop("random"))
    exact = exact and random == (scene.random or random)
    return _manifest("replay", inputs, facts={"step": scene.step, "why": scene.why, "exact": exact, **found})


@contextmanager
def _sole(run: JobRun) -> Iterator[str]:
    """Be the only writer of a job's output, after whoever was; the value is the token."""
    with writer.sole(run.folder, run.job.output) as token:
        run.follow()
        yield token


def _locate(run: JobRun) -> Inputs:
    return locate(run.job, _beats(run, "inputs"))


def _beats(run: JobRun, phase: str) -> Heard:
    """Signs of life, no more often than the spec says, from what has no progress of its own to tell."""
    return paced(lambda: run.progress(phase, 0, 1), run.spec.train.heartbeat_seconds)


def _last_loss(records: list[dict[str, Any]]) -> float | None:
    """Of the last step that was not skipped."""
    return next((record["loss"] for record in reversed(records) if not record.get("skipped")), None)


def _metrics(output: str) -> str:
    store, place = store_for(output), join(output, metrics.METRICS)
    return store.read(place).decode(errors="replace") if store.exists(place) else ""


HANDLERS: dict[str, Handler] = {
    "plan": plan, "preflight": preflight, "overfit": overfit, "smoke": smoke, "trial": trial, "train": train,
    "replay": replay, "early": early,
}  # fmt: skip


def _manifest(kind: str, inputs: Inputs, *, facts: dict[str, Any], outputs: dict[str, str] | None = None) -> Manifest:
    return Manifest(
        kind=kind, fingerprint=inputs.fingerprint, facts=facts, outputs=outputs or {},
        inputs=inputs.digests,
    )  # fmt: skip
