"""The data stage's operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from operators import quarantine, run
from operators.job import JobOperator
from operators.links import BadRecordsLink, DataDocsLink, DataReportLink, FolderLink
from refit.errors import BadInput
from refit.job import Job
from refit.manifest import Manifest
from refit.spec import Pipeline
from refit.store import join

if TYPE_CHECKING:
    from airflow.sdk import Context


class CorpusOperator(JobOperator):
    """Prepare a line's data, from ingest to pack; the manifest names the dataset.

    The job's folder belongs to the run; the phases' folders are named by fingerprints, so a run with nothing changed
    reads a few manifests and is done. What went to quarantine is copied into Postgres, also when it was
    too much.

    What it does not do: decide which phases run again (their fingerprints do).
    """

    kind: ClassVar[str] = "prepare"
    stage: ClassVar[str] = "data"
    operator_extra_links = (FolderLink(), DataReportLink(), DataDocsLink(), BadRecordsLink())

    def output_of(self, spec: Pipeline, context: Context) -> str:
        return join(run.folder(spec.name, context["run_id"]), "prepare")

    def finish(self, job: Job, manifest: Manifest, context: Context) -> str:
        uri = super().finish(job, manifest, context)
        quarantine.project(job)
        return uri

    def conclude(self, context: Context, event: dict[str, Any]) -> str:
        try:
            return super().conclude(context, event)
        except BadInput:
            quarantine.project(self.build_job(context))
            raise


class ShareOperator(JobOperator):
    """Make one machine's share of a round of the shards. Meant to be mapped, a task a machine, round after round.

    A share that fails is retried alone; what it had made is kept, since every shard is a folder of its own. The
    CorpusOperator after the last round finds the shards, and makes those that are missing.

    What it does not do: decide what is in a shard (the data does), so any number of shares gives the same dataset.
    """

    kind: ClassVar[str] = "share"
    stage: ClassVar[str] = "data"

    def output_of(self, spec: Pipeline, context: Context) -> str:
        share = "share-{round}-{share}-of-{shares}".format(**self.options)
        return join(run.folder(spec.name, context["run_id"]), share)


def rounds(spec: Pipeline) -> dict[str, list[dict[str, int | str]]]:
    """The rounds that a line's machines share out, by their task's id: the options of each share.

    A round needs all of the one before: the lines that records of a source share tell how a record is signed, and the
    signatures of all tell which are near. What lies elsewhere is asked for and cut first, by one each.
    """
    names = {"shares": "records", "signatures": "sign", "pairs": "match"}
    if any(source.uri.startswith(("s3://", "sql://")) for source in spec.data.sources):
        names = {"cuts": "cut", **names}
    machines = spec.data.machines
    return {
        task: [{"round": name, "share": number, "shares": machines} for number in range(machines)]
        for task, name in names.items()
    }
