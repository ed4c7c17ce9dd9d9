"""An early look at a training that goes on, and the stop of one that gets worse."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk.exceptions import AirflowSkipException

from operators import backends, pods, projection, run
from operators.errors import Cancelled
from operators.job import JobOperator
from operators.training import training_folder
from refit import runs
from refit.errors import BadInput, RefitError
from refit.fingerprint import digest
from refit.job import Job
from refit.manifest import Manifest
from refit.spec import Pipeline

if TYPE_CHECKING:
    from airflow.sdk import Context


class EarlyOperator(JobOperator):
    """Compare a checkpoint with the model that its training began with; stop the training where it is surely worse.

    Purpose: a run that goes wrong is over after a part of its time, not after all of it.

    Mechanism: a job of its own loads the checkpoint while the training goes on. Where its verdict is worse, the reason
    is written into the run's folder first, and then the training's job is stopped: its task finds the reason, and ends
    refused. The checkpoints stay.

    What it does not do: keep a checkpoint from being thrown away by `train.checkpoint.keep_last`, or hold the run up;
    where there is nothing to look at any more it is skipped, and also where it fails for good: it is a leaf of the run,
    which would be red for it, whatever the training and the gate say. An alert tells of that.

    Known race: a training that ends before the verdict goes on to the exam, which judges it better than this does.

    Args:
        checkpoint: address of the checkpoint, as `CheckpointSensor` returns it.
    """

    kind: ClassVar[str] = "early"
    stage: ClassVar[str] = "train"

    def __init__(self, *, checkpoint: str, **kwargs: Any) -> None:
        kwargs.setdefault("pool", "evaluate")  # the one slot of the training's is the training's
        super().__init__(options={**kwargs.pop("options", {}), "checkpoint": checkpoint}, **kwargs)

    def execute(self, context: Context) -> str:
        if "/checkpoints/" not in self.options["checkpoint"]:
            raise AirflowSkipException("the training was done before its checkpoint was seen; the exam judges it")
        try:
            return super().execute(context)
        except RefitError as error:
            raise self._given_up(error, context) from error

    def output_of(self, spec: Pipeline, context: Context) -> str:
        name = digest({"early": spec.train.early, "checkpoint": self.options["checkpoint"]})[:12]
        return f"{training_folder(spec, self.inputs['dataset'], 'early-')}-{name}"

    def inputs_of(self, spec: Pipeline) -> dict[str, str]:
        return {**super().inputs_of(spec), "base": spec.train.base}

    def conclude(self, context: Context, event: dict[str, Any]) -> str:
        try:
            return super().conclude(context, event)
        except RefitError as error:
            raise self._given_up(error, context) from error

    def _given_up(self, error: RefitError, context: Context) -> Exception:
        """The error itself while it is worth another try, or a person's doing; then a skip, with an alert."""
        ti = context["ti"]
        if isinstance(error, BadInput):
            return AirflowSkipException(f"nothing to look at any more: {error}")
        again = error.retry and ti.try_number <= ti.max_tries
        if again or isinstance(error, Cancelled):
            return error
        why = f"no early look: {error}"
        projection.alert("suspicious", "train", why, key=f"early/{self.folder}/failed", pipeline=self.pipeline)
        return AirflowSkipException(f"{why} (the training goes on; the exam judges it)")

    def finish(self, job: Job, manifest: Manifest, context: Context) -> str:
        facts = manifest.facts
        self.log.info("%s: %s", facts["verdict"], told(facts))
        if facts["verdict"] == "worse":
            training = training_folder(job.spec, job.inputs["dataset"])
            runs.refuse(run.folder(job.pipeline, context["run_id"]), told(facts))
            # It may write its checkpoint: a person may raise the margin, and go on from it.
            if backends.named(backends.chosen()).stop(training, grace=pods.grace(job)):
                self.log.warning("stopped %s", training)
            projection.alert("suspicious", "train", told(facts), key=f"early/{job.output}", pipeline=job.pipeline)
        return super().finish(job, manifest, context)


def told(facts: dict[str, Any]) -> str:
    """A verdict in a sentence."""
    return (
        f"at step {facts['step']} the loss on {facts['documents']} documents of the validation split is "
        f"{facts['loss']:.3g}, the base model's {facts['base_loss']:.3g}: a difference of {facts['difference']:+.3g} "
        f"({facts['low']:+.3g} to {facts['high']:+.3g}; refused above {facts['margin']:+.3g})"
    )
