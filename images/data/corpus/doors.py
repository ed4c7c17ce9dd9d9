"""The doors between phases: what a phase has made is asked before the next one begins, and what it said is kept.

A door is a folder of its own with its Data Docs, named by what it asked of what: one that was passed is not asked
again, one that was not is asked again by the next run. The door out is in `pack`.
"""

from __future__ import annotations

import pyarrow.parquet as pq

from corpus import door, questions, rows
from corpus.door import Asked
from corpus.rows import ROWS
from corpus.settings import DoorSettings
from corpus.task import REMOVED, Facts, Task


def run(task: Task) -> Facts:
    """Ask what there is to ask after a phase. Who must have been met is stopped by `prepare`: the docs are kept."""
    settings: DoorSettings = task.settings
    asked, records = _asked(task, settings)
    told = door.ask(asked, task.folder / "data_docs")
    return {"records_in": records, "records_out": records, "quarantined": 0, "expectations": told}


def _asked(task: Task, settings: DoorSettings) -> tuple[Asked, int]:
    if settings.after == "clean":
        table = rows.collect(task.shards["records"])
        return questions.after_clean(table, settings), table.num_rows
    table = rows.read(task.inputs["rows"] / ROWS)
    if settings.after == "dedup":
        gone = pq.read_table(task.inputs["rows"] / REMOVED, columns=["source"])
        return questions.after_dedup(table, gone, settings), table.num_rows
    return questions.after_split(table, settings), table.num_rows
