"""Buttons on a task in the Airflow UI: what it made, where to read it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from airflow.sdk import BaseOperatorLink

from refit.store import join

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator


def page_of(uri: str) -> str:
    """The address at which the board shows a file or folder of the store; empty for what lies elsewhere."""
    root = os.environ.get("REFIT_STORE", "").rstrip("/")
    if not root or not uri.startswith(root + "/"):
        return ""
    return f"{os.environ.get('REFIT_AIRFLOW_URL', '')}/refit/store/{quote(uri[len(root) + 1 :])}"


class _Page(BaseOperatorLink):
    """A link to something below the folder that the task's job wrote (`operator.folder`)."""

    below: str = ""

    def get_link(self, operator: BaseOperator, *, ti_key: Any) -> str:
        folder = getattr(operator, "folder", None)
        return page_of(join(folder, self.below) if self.below else folder) if folder else ""


class FolderLink(_Page):
    """The job's folder: document, events, progress, outputs, manifest."""

    name = "Folder"


class CheckpointsLink(_Page):
    """The checkpoints of a training."""

    name = "Checkpoints"
    below = "checkpoints"


class ReportLink(_Page):
    """The comparison's report, as a page."""

    name = "Report"
    below = "report.html"


class DataReportLink(_Page):
    """What the data stage did, phase by phase and door by door, also where a run was refused."""

    name = "Data report"
    below = "report.html"


class DataDocsLink(_Page):
    """What Great Expectations found at the door out of the data stage."""

    name = "Data docs"

    def get_link(self, operator: BaseOperator, *, ti_key: Any) -> str:
        dataset = getattr(operator, "outputs", {}).get("dataset")
        return page_of(join(dataset, "data_docs", "index.html")) if dataset else ""


class BadRecordsLink(_Page):
    """What the job put into quarantine, by source and reason."""

    name = "Bad records"

    def get_link(self, operator: BaseOperator, *, ti_key: Any) -> str:
        job = getattr(operator, "job_id", None)
        return f"{os.environ.get('REFIT_AIRFLOW_URL', '')}/refit/quarantine?job={quote(job, safe='')}" if job else ""


class MLflowLink(BaseOperatorLink):
    """The line's registered model."""

    name = "MLflow"

    def get_link(self, operator: BaseOperator, *, ti_key: Any) -> str:
        address, pipeline = os.environ.get("MLFLOW_TRACKING_URI", ""), getattr(operator, "pipeline", None)
        return f"{address}/#/models/{quote(pipeline)}" if address.startswith("http") and pipeline else ""
