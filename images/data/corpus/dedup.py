"""Phase 3, dedup: of records that say the same, one stays.

Exact duplicates (after normalisation) go first, then near duplicates among those that are left. The one that stays is
the oldest; where no time tells, the one with the lowest id, which follows from content: the order of the deliveries
decides nothing.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from corpus import lsh, record, removed, text
from corpus.removed import Removal
from corpus.settings import DedupSettings
from corpus.shingles import Texts
from corpus.task import RECORDS, REMOVED, Facts, Task
from refit.spec import Dedup


def run(task: Task) -> Facts:
    """Remove duplicates and write down of whom."""
    settings: DedupSettings = task.settings
    table = record.read(task.inputs["records"] / RECORDS)
    said = [text.lines(_said(messages)) for messages in table.column("messages").to_pylist()]
    task.progress(table.num_rows // 3, table.num_rows)
    sources, labels = table.column("source").to_pylist(), table.column("label").to_pylist()
    removals, found = duplicates(said, sources, _order(table), settings.dedup)
    kept = removed.take_out(table, removals, task.folder / REMOVED)
    record.write(task.folder / RECORDS, kept)
    return {
        "records_in": table.num_rows,
        "records_out": kept.num_rows,
        "quarantined": 0,
        "removed": removed.counted(removals),
        "conflicting": sum(labels[removal.row] != labels[removal.kept] for removal in removals),
        "candidate_pairs": found.candidate_pairs,
        "verified_pairs": found.verified_pairs,
    }


def duplicates(
    texts: list[str], sources: list[str], order: list[int], settings: Dedup
) -> tuple[list[Removal], lsh.Clusters]:
    """Which texts go, each with the one that stays.

    Args:
        texts: normalised, as `text.lines` gives them.
        sources: of each text; what is boilerplate is judged a source at a time.
        order: all numbers, those to keep first.
        settings: the threshold and how candidates are found.
    """
    first: dict[str, int] = {}
    removals = []
    for row in order:
        keeper = first.setdefault(texts[row].replace("\n", " "), row)
        if keeper != row:
            removals.append(Removal(row, keeper, "exact", 1.0))
    left = list(first.values())  # in the order of keeping: the lowest number of a cluster is its keeper
    own = [Texts.of(text.distinctive([texts[row] for row in left], [sources[row] for row in left]))]
    found = lsh.clusters(own, settings)
    gone = np.flatnonzero(found.root != np.arange(len(left)))
    near = lsh.similarity(own, gone, found.root[gone], settings.ngram)
    stays = {left[i]: left[root] for i, root in enumerate(found.root.tolist())}
    removals = [removal._replace(kept=stays[removal.kept]) for removal in removals]
    for i, share in zip(gone.tolist(), near.tolist(), strict=True):
        removals.append(Removal(left[i], stays[left[i]], "near", share))
    return removals, found


def _said(messages: str) -> str:
    """What a record says: every turn but the system's, which says the same to all."""
    return "\n".join(message["content"] for message in record.load(messages) if message["role"] != "system")


def _order(table: pa.Table) -> list[int]:
    """Row numbers, those to keep first: the oldest, then the lowest id."""
    times, ids = table.column("time").to_pylist(), table.column("id").to_pylist()
    return sorted(range(table.num_rows), key=lambda row: (times[row] is None, times[row] or "", ids[row]))
