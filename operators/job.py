"""The operator under all stages: one job, started or found again, waited for without holding a worker."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.providers.cncf.kubernetes.operators.pod import KubernetesPodOperator
from airflow.sdk import BaseOperatorLink

from operators import backends, pods, projection, run, tracking
from operators.errors import Cancelled, restore
from operators.links import FolderLink
from operators.triggers import JobTrigger
from refit import fingerprint, runs
from refit.errors import BadInput
from refit.job import Job
from refit.manifest import MANIFEST, Manifest
from refit.spec import Pipeline
from refit.states import State
from refit.store import join, store_for

if TYPE_CHECKING:
    from airflow.sdk import Context
    from kubernetes.client import V1Pod

GRACE_BEFORE_RUN_ENDS = 60.0
"""A job has ended this long before its run's time is over: Airflow's own time-out would leave it running."""

POLL_SECONDS = {"local": 1.0, "kubernetes": 10.0}
"""How often a job is looked at: a file is cheap, an API server is shared."""

QUICK_SECONDS = {"local": 8.0}
"""A job that ends so soon is waited for in place. To leave the worker and come back takes the scheduler longer; and a
trigger that fires before the scheduler has heard of the leaving costs a try. Pods take longer only to start."""

QUICK_POLL_SECONDS = 0.2

NEVER_QUICK = frozenset({"train", "trial", "evaluate"})
"""Kinds that are not waited for in place: they take minutes, and a deferred task outlives its scheduler at no cost."""


class JobOperator(KubernetesPodOperator):
    """Do one job, in a pod or as a local process, and return the URI of its manifest.

    Purpose: the same task whatever is under it. REFIT_BACKEND chooses the backend; the job's program cannot tell.

    Mechanism: the job's document is built from the run's resolved spec and written into the output folder, whose name
    is the fingerprint of the work. A manifest there answers at once. Otherwise the backend starts the job, or adopts
    the living one, and a task whose job is not over within seconds defers: it holds no worker while the job runs. The
    exit code comes back as the matching exception, and the retry policy decides by its class.

    What it does not do: stream XCom through a sidecar (the manifest is the result), or delete a job because its worker
    is told to stop. Only a person who ends the task stops its job.

    Known race: a task that a person ends between the start and the deferral is noticed just before the deferral; a
    worker killed hard in that time leaves the job to the next try, which adopts it.

    Args:
        spec: URI of the run's resolved spec.
        inputs: role → URI of a job's manifest, or of a committed folder.
        options: what the stage's program gets beside the spec.
        heartbeat_timeout: seconds without a sign of life after which a job counts as hung.
    """

    kind: ClassVar[str]
    stage: ClassVar[str]
    """The image, and the Airflow pool."""

    template_fields: Sequence[str] = (*KubernetesPodOperator.template_fields, "spec", "inputs", "options")
    operator_extra_links: tuple[BaseOperatorLink, ...] = (FolderLink(),)
    ui_color = "#eef4ff"

    def __init__(
        self,
        *,
        spec: str,
        inputs: Mapping[str, str] | None = None,
        options: Mapping[str, Any] | None = None,
        heartbeat_timeout: float = 900.0,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("pool", self.stage)
        kwargs.setdefault("deferrable", True)
        kwargs.setdefault("poll_interval", POLL_SECONDS.get(backends.chosen(), 10.0))
        kwargs.setdefault("image", pods.image(self.stage))
        kwargs.setdefault("namespace", pods.namespace())
        super().__init__(**kwargs)
        self.spec = spec
        self.inputs = dict(inputs or {})
        self.options = dict(options or {})
        self.heartbeat_timeout = heartbeat_timeout
        # KubernetesPodOperator reads this as "add a sidecar"; to Airflow it means "push what execute returns".
        self.do_xcom_push = True
        self.folder: str | None = None
        self.job_id: str | None = None
        self.pipeline: str | None = None
        self.outputs: dict[str, str] = {}

    def output_of(self, spec: Pipeline, context: Context) -> str:
        """The URI of the output folder: named by the fingerprint of the work."""
        raise NotImplementedError

    def execute(self, context: Context) -> str:
        job = self.build_job(context)
        runs.note(run.folder(job.pipeline, context["run_id"]), _task(self.task_id, context), job)
        manifest = self.answer(job)
        if manifest is not None:
            self.log.info("answered by fingerprint: %s is there already", job.output)
            return self.finish(job, manifest, context)
        backend = backends.named(backends.chosen())
        job = job if backend.adopt(job.output) else self.before_start(job)
        cursor = backend.end_of_log(job.output)
        asked = datetime.now(UTC)
        started = backend.submit(job, pod=lambda: self.build_pod(job, context))
        self.log.info("%s %s, a %s job; its folder is %s", "started" if started else "adopted", job.id, backend.name,
                      job.output)  # fmt: skip
        projection.project(job, context["run_id"], asked=asked if started else None)
        return self._wait(job, backend, cursor, context)

    def conclude(self, context: Context, event: dict[str, Any]) -> str:
        """After the wait: the manifest's URI, or the exception that the job's end stands for."""
        job = self.build_job(context)
        if event["status"] != "done":
            error = restore(event)
            projection.project(job, context["run_id"])
            projection.mark(job, State.RETRYING if error.retry else State.FAILED, str(error))
            tracking.end(job, error)
            raise error
        tracking.end(job)
        return self.finish(job, committed(job.output), context)

    def finish(self, job: Job, manifest: Manifest, context: Context) -> str:
        """What is done with a finished job; subclasses add to it. Returns what the task returns."""
        self.outputs = dict(manifest.outputs)
        projection.project(job, context["run_id"])
        return join(job.output, MANIFEST)

    def build_job(self, context: Context) -> Job:
        """The job's document. The same inputs give the same output folder, on any try."""
        spec = self.spec_of_job()
        self.inputs = self.inputs_of(spec)
        output = self.output_of(spec, context)
        self.folder, self.pipeline = output, spec.name
        self.job_id = f"{self.kind}-{spec.name}-{fingerprint.digest(output)[:12]}"
        return Job.build(
            self.kind, spec, store=run.store_uri(), output=output, inputs=self.inputs, options=self.options,
            id=self.job_id, attempt=context["ti"].try_number,
        )  # fmt: skip

    def spec_of_job(self) -> Pipeline:
        """The run's resolved spec; a subclass may change what its job must see differently."""
        return run.read_spec(self.spec)

    def inputs_of(self, spec: Pipeline) -> dict[str, str]:
        """Role → URI of a committed folder. Of a job's manifest, the output named as the role is meant."""
        return {role: run.output_named(uri, role) for role, uri in self.inputs.items()}

    def answer(self, job: Job) -> Manifest | None:
        """What an earlier try, or another run, left as the answer; None when there is work to do."""
        return store_for(job.output).manifest(job.output)

    def before_start(self, job: Job) -> Job:
        """What a stage must add to a job that is really started (a server's address), not merely looked up."""
        return job

    def build_pod(self, job: Job, context: Context) -> V1Pod:
        """The pod that does this job, from KubernetesPodOperator's own machinery."""
        pods.dress(self, job)
        self.do_xcom_push = False  # no sidecar
        try:
            return self.build_pod_request_obj(context, dry_run=True)
        finally:
            self.do_xcom_push = True

    def on_kill(self) -> None:
        """SIGTERM says the same for a worker's shutdown and for a person's cancel; `execute` asks which it was."""
        self._killed = True

    def _wait(self, job: Job, backend: backends.Backend, cursor: str, context: Context) -> str:
        """Wait for the job: a few seconds here, then deferred."""
        wait: dict[str, Any] = {
            "job": job.uri, "backend": backend.name, "run_id": context["run_id"],
            "heartbeat_timeout": self.heartbeat_timeout, "since": time.time(),
            "deadline": deadline(job.spec, context) - pods.grace(job), "poll_seconds": self.poll_interval,
        }  # fmt: skip
        here = JobTrigger(cursor=cursor, **wait)
        until = time.monotonic() + (0.0 if job.kind in NEVER_QUICK else QUICK_SECONDS.get(backend.name, 0.0))
        while time.monotonic() < until and not self._killed:
            if (event := here.ask()) is not None:
                return self.conclude(context, event)
            time.sleep(QUICK_POLL_SECONDS)
        self._stop_if_cancelled(backend, job, context)
        self.defer(trigger=JobTrigger(cursor=here.cursor, **wait), method_name="conclude")
        raise AssertionError("defer raises")

    def _stop_if_cancelled(self, backend: backends.Backend, job: Job, context: Context) -> None:
        """Asked before each deferral: a person's act reaches a worker seconds late, and a trigger that is never made
        would end nothing."""
        if _state(context) == "running":
            if self._killed:
                self.log.info("the worker shuts down; the job goes on")
            return
        backend.stop(job.output, grace=pods.grace(job))
        raise Cancelled(f"{job.id}: its task was ended by hand, so the job was stopped")


def _state(context: Context) -> str | None:
    """What Airflow thinks of this task."""
    ti = context["ti"]
    number = getattr(ti, "map_index", None)
    states = ti.get_task_states(dag_id=ti.dag_id, task_ids=[ti.task_id], run_ids=[ti.run_id])
    name = ti.task_id if number is None or number < 0 else f"{ti.task_id}_{number}"
    found: str | None = states.get(ti.run_id, {}).get(name)
    return found


def _task(task_id: str, context: Context) -> str:
    """A task's name within its run: one of several mapped ones has a number too."""
    number = getattr(context["ti"], "map_index", -1)
    return task_id if number is None or number < 0 else f"{task_id}-{number}"


def committed(uri: str) -> Manifest:
    """The manifest of a folder that must have one by now."""
    manifest = store_for(uri).manifest(uri)
    if manifest is None:
        raise BadInput(f"{uri}: no manifest.json there; clear the task that makes it.")
    return manifest


def deadline(spec: Pipeline, context: Context) -> float:
    """When what this run started must be over, in seconds since the epoch."""
    started = getattr(context["dag_run"], "start_date", None) or datetime.now(UTC)
    return float(started.timestamp()) + spec.timeout_hours * 3600 - GRACE_BEFORE_RUN_ENDS
