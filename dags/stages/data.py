"""What the model eats: ingest → clean → dedup → split → mix → pack."""

from __future__ import annotations

from typing import Any

from airflow.sdk import XComArg, task_group

from operators.data import CorpusOperator


@task_group(group_id="prepare_data", group_display_name="Data")
def prepare_data(spec: XComArg) -> Any:
    """One job; its phases are cached by fingerprint, each alone."""
    return CorpusOperator(task_id="corpus", spec=spec).output
