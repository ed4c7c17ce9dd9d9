"""The data stage's operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from operators import run
from operators.job import JobOperator
from operators.links import DataDocsLink, FolderLink
from refit.spec import Pipeline
from refit.store import join

if TYPE_CHECKING:
    from airflow.sdk import Context


class CorpusOperator(JobOperator):
    """Prepare a line's data: ingest, clean, dedup, split, mix, pack; the manifest names the dataset.

    The job's folder belongs to the run; the phases' folders are named by fingerprints, so a run with nothing changed
    reads a few manifests and is done.

    What it does not do: decide which phases run again (their fingerprints do).
    """

    kind: ClassVar[str] = "prepare"
    stage: ClassVar[str] = "data"
    operator_extra_links = (FolderLink(), DataDocsLink())

    def output_of(self, spec: Pipeline, context: Context) -> str:
        return join(run.folder(spec.name, context["run_id"]), "prepare")
