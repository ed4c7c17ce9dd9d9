"""What the model eats: ingest → clean → tokenize → sign → match → dedup → split → mix → pack."""

from __future__ import annotations

from typing import Any

from airflow.sdk import XComArg, chain, task_group

from operators.data import CorpusOperator, ShareOperator, rounds
from operators.lines import Line


@task_group(group_id="prepare_data", group_display_name="Data")
def prepare_data(line: Line, spec: XComArg) -> Any:
    """One job; its phases are cached by fingerprint, each alone. Where a line asks for machines, each does a share."""
    assert line.spec is not None
    corpus = CorpusOperator(task_id="corpus", spec=spec)
    if line.spec.data.machines > 1:
        shared = rounds(line.spec).items()
        chain(*(ShareOperator.partial(task_id=id, spec=spec).expand(options=each) for id, each in shared), corpus)
    return corpus.output
