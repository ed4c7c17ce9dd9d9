"""What the model eats: ingest → clean → tokenize → sign → dedup → split → mix → pack."""

from __future__ import annotations

from typing import Any

from airflow.sdk import XComArg, task_group

from operators.data import CorpusOperator, ShareOperator
from operators.lines import Line


@task_group(group_id="prepare_data", group_display_name="Data")
def prepare_data(line: Line, spec: XComArg) -> Any:
    """One job; its phases are cached by fingerprint, each alone. Where a line asks for machines, each does a share."""
    assert line.spec is not None
    machines = line.spec.data.machines
    corpus = CorpusOperator(task_id="corpus", spec=spec)
    if machines > 1:
        shares = [{"share": number, "shares": machines} for number in range(machines)]
        ShareOperator.partial(task_id="shares", spec=spec).expand(options=shares) >> corpus
    return corpus.output
