"""The evaluation stage's operators: one asks, one compares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from operators import projection, run
from operators.controller import Controller
from operators.job import JobOperator, committed
from operators.links import FolderLink, MLflowLink, ReportLink
from refit.errors import GateRefused, ServerUnavailable
from refit.fingerprint import comparison_fingerprint, evaluation_fingerprint
from refit.job import Job
from refit.manifest import MANIFEST, Manifest
from refit.spec import Pipeline
from refit.store import join

if TYPE_CHECKING:
    from airflow.sdk import Context


def pass_gate(comparison: str) -> str:
    """Let a candidate through, or say why not.

    Args:
        comparison: URI of the comparison's manifest.

    Raises:
        GateRefused: worse, or not measured well enough to know. No data is never a pass.
    """
    facts = committed(comparison.removesuffix("/" + MANIFEST)).facts
    verdict, why = facts.get("verdict"), facts.get("why") or "no reason given"
    if verdict != "pass":
        raise GateRefused(f"{verdict or 'no verdict'}: {why}")
    return comparison


class EvaluateOperator(JobOperator):
    """Ask one release all items of the exam, in the form it is served in: batch inference through its vLLM server.

    The answers are named by the exam, the dataset and the release; a release that was asked before is not asked again,
    and needs no server then.

    What it does not do: start the server (`VllmOperator` does), or judge (`CompareOperator` does).

    Args:
        release: URI of the release's document in the run's folder.
    """

    kind: ClassVar[str] = "evaluate"
    stage: ClassVar[str] = "evaluate"
    template_fields: Sequence[str] = (*JobOperator.template_fields, "release")

    def __init__(self, *, release: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.release = release

    def output_of(self, spec: Pipeline, context: Context) -> str:
        release = run.read_release(self.release)
        dataset = committed(self.inputs["dataset"]).content_digest()
        name = evaluation_fingerprint(spec.evaluate, dataset=dataset, release=release.id)
        return join(run.store_uri(), "evaluations", spec.name, name)

    def inputs_of(self, spec: Pipeline) -> dict[str, str]:
        return {**super().inputs_of(spec), "release": run.read_release(self.release).model}

    def before_start(self, job: Job) -> Job:
        release = run.read_release(self.release)
        server = Controller().server(release.id)
        if server.get("state") != "ready":
            raise ServerUnavailable(f"the server of {release.id} is {server.get('state')}: {server.get('why') or ''}")
        options = {**job.options, "url": server["url"], "release_id": release.id}
        return job.model_copy(update={"options": options})


class CompareOperator(JobOperator):
    """Compare two evaluations item by item, and write the verdict and the report.

    What it does not do: stop a run; a verdict is a result. The gate's task reads it.
    """

    kind: ClassVar[str] = "compare"
    stage: ClassVar[str] = "evaluate"
    operator_extra_links = (FolderLink(), ReportLink(), MLflowLink())

    def output_of(self, spec: Pipeline, context: Context) -> str:
        digests: Mapping[str, str] = {role: committed(uri).content_digest() for role, uri in self.inputs.items()}
        name = comparison_fingerprint(spec.evaluate, candidate=digests["candidate"], champion=digests["champion"])
        return join(run.store_uri(), "evaluations", spec.name, name)

    def finish(self, job: Job, manifest: Manifest, context: Context) -> str:
        facts, candidate = manifest.facts, manifest.facts.get("candidate", {})
        projection.evaluation(
            id=manifest.fingerprint, pipeline=job.pipeline, release=candidate.get("release"),
            champion=facts.get("champion", {}).get("release"), run_id=context["run_id"], verdict=facts.get("verdict"),
            forced=bool(facts.get("forced")), score=candidate.get("score"), low=candidate.get("low"),
            high=candidate.get("high"), report=join(job.output, "report.html"), facts=facts,
        )  # fmt: skip
        self.log.info("%s: %s", facts.get("verdict"), facts.get("why"))
        return super().finish(job, manifest, context)
