"""The training stage's operator, and the sensor that watches it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowSkipException

from operators import backends, run
from operators.errors import restore
from operators.job import JobOperator, committed, deadline
from operators.links import CheckpointsLink, FolderLink
from operators.retries import PREEMPTIONS
from operators.triggers import CheckpointTrigger
from refit import runs
from refit.errors import GateRefused
from refit.fingerprint import digest, layout, training_fingerprint
from refit.job import EVENTS, Job
from refit.manifest import Manifest
from refit.progress import duration
from refit.spec import Pipeline
from refit.store import join, store_for

if TYPE_CHECKING:
    from airflow.sdk import Context

Kind = Literal["plan", "preflight", "trial", "smoke", "train"]

STOPPED = "stopped early"
"""How the refusal of a training begins that an early look stopped."""

LOOKS_ANEW = frozenset({"preflight", "trial"})
"""Kinds that look at the machine as it is now: each run has its own, and a cleared task does it again."""


class DeepSpeedOperator(JobOperator):
    """Train with DeepSpeed, in a pod or as a local process; or plan it, or try it before.

    Starts (or adopts) one training job and waits, deferred, for its manifest. A retry continues from the newest
    complete checkpoint; it never starts a second job beside a living one. A preempted training comes back as often as
    it must, everything else a few times.

    What it does not do: choose hyperparameters (`trainer plan` does), watch the loss (the trainer does).

    Args:
        kind: plan; preflight (are the machines fit?); trial (preflight, a handful learnt by heart, a few steps with a
            save and a restore, of which only preflight is done again where the rest is known); smoke; or train.
        first_champion: train the few steps of `promote.first_champion` instead.
    """

    kind: str  # type: ignore[misc]
    stage: ClassVar[str] = "train"
    operator_extra_links = (FolderLink(), CheckpointsLink())

    def __init__(self, *, kind: Kind = "train", first_champion: bool = False, **kwargs: Any) -> None:
        if kind == "train":
            kwargs.setdefault("retries", PREEMPTIONS)
        super().__init__(**kwargs)
        self.kind = kind
        self.first_champion = first_champion

    def spec_of_job(self) -> Pipeline:
        spec = super().spec_of_job()
        if not self.first_champion:
            return spec
        train = spec.train.model_copy(update={"max_steps": spec.promote.first_champion.max_steps})
        return spec.model_copy(update={"train": train})

    def output_of(self, spec: Pipeline, context: Context) -> str:
        folder = training_folder(spec, self.inputs["dataset"], "" if self.kind == "train" else f"{self.kind}-")
        if self.kind == "train":
            return folder
        return f"{folder}-{digest(context['run_id'])[:12] if self.kind in LOOKS_ANEW else layout(spec.train)}"

    def execute(self, context: Context) -> str:
        if self._may_be_refused:
            _pass_early(run.read_spec(self.spec).name, context)
        return super().execute(context)

    def conclude(self, context: Context, event: dict[str, Any]) -> str:
        # One that was done before it could be stopped goes on: the exam judges it.
        if self._may_be_refused and event["status"] != "done":
            _pass_early(run.read_spec(self.spec).name, context)
        return super().conclude(context, event)

    @property
    def _may_be_refused(self) -> bool:
        return self.kind == "train" and not self.first_champion

    def answer(self, job: Job) -> Manifest | None:
        if self.kind not in LOOKS_ANEW:
            return super().answer(job)
        if super().answer(job) is not None and not backends.named(backends.chosen()).adopt(job.output):
            _forget(job)
        return None

    def inputs_of(self, spec: Pipeline) -> dict[str, str]:
        return {**super().inputs_of(spec), "base": spec.train.base}


def _pass_early(pipeline: str, context: Context) -> None:
    """Raise GateRefused where an early look at a checkpoint stopped this run's training."""
    why = runs.refused(run.folder(pipeline, context["run_id"]))
    if why is not None:
        raise GateRefused(
            f"{STOPPED}: {why}. Nothing is published. To go on from the last checkpoint all the same, start a run with "
            "a larger train.early.margin, or without train.early."
        )


def _forget(job: Job) -> None:
    """Take away what a job found, so that it is done again; its events stay, and go on counting."""
    store, events = store_for(job.output), join(job.output, EVENTS)
    told = store.read(events) if store.exists(events) else b""
    store.remove(job.output)
    store.write(events, told)


def training_folder(spec: Pipeline, dataset: str, prefix: str = "") -> str:
    """Where a training lies: named by its spec, and by what it starts from, all of which must be committed."""
    warm_start = spec.train.warm_start
    name = training_fingerprint(
        spec.train, dataset=committed(dataset).content_digest(), base=committed(spec.train.base).content_digest(),
        warm_start=committed(warm_start).content_digest() if warm_start else None,
    )  # fmt: skip
    return join(run.store_uri(), "training", spec.name, prefix + name)


class CheckpointSensor(BaseOperator):
    """Fires on the first complete checkpoint of a training at or after a step, when it is done, or when it stalls.

    So that work on a checkpoint can start while the training goes on. It reads manifests and heartbeats only: a
    checkpoint without a manifest does not exist. It is skipped when the training's task ends without any.

    Args:
        spec: URI of the run's resolved spec.
        dataset: URI of the data job's manifest.
        step: the first step that counts; 0 for any, one more than a known checkpoint's for a newer one; None for no
            checkpoint at all, only the end.
        beside: the id of the task that trains.
        full: pass over checkpoints that hold weights alone.
        stall_seconds: fire when the training gave no sign of life for so long; None to wait on.

    Returns:
        The checkpoint's URI: after a stall the newest there is; the training's own folder when it was done before.
    """

    template_fields: Sequence[str] = ("spec", "dataset")
    operator_extra_links = (FolderLink(),)
    ui_color = "#f4f0ff"

    def __init__(
        self,
        *,
        spec: str,
        dataset: str,
        beside: str,
        step: int | None = 0,
        full: bool = False,
        stall_seconds: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.spec = spec
        self.dataset = dataset
        self.beside = beside
        self.step = step
        self.full = full
        self.stall_seconds = stall_seconds
        self.folder: str | None = None

    def execute(self, context: Context) -> str:
        spec = run.read_spec(self.spec)
        self.folder = training_folder(spec, run.output_named(self.dataset, "dataset"))
        ti = context["ti"]
        self.defer(
            trigger=CheckpointTrigger(
                output=self.folder, step=self.step, deadline=deadline(spec, context), poll_seconds=3.0,
                beside={"dag_id": ti.dag_id, "run_ids": [ti.run_id], "task_ids": [self.beside]},
                full=self.full, stall_seconds=self.stall_seconds, since=time.time(),
            ),
            method_name="conclude",
        )  # fmt: skip
        raise AssertionError("defer raises")

    def conclude(self, context: Context, event: dict[str, Any]) -> str:
        """After the wait: the checkpoint's URI."""
        if event["status"] == "failed":
            raise restore(event)
        if event["status"] == "nothing":
            raise AirflowSkipException("the training ended without a complete checkpoint")
        if event.get("why") == "stalled":
            self.log.warning("the training gave no sign of life for %s", duration(event["silent"]))
        if event["checkpoint"] is None:
            raise AirflowSkipException("the training stalled before its first complete checkpoint")
        self.folder = str(event["checkpoint"])
        manifest = store_for(self.folder).manifest(self.folder)
        self.log.info("complete: %s, written %s", self.folder, manifest.created if manifest else "")
        return self.folder
