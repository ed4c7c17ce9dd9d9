"""Bad records: never fatal by themselves, never lost. Each is kept with its origin, a reason, and a clipped sample."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from corpus.record import write
from refit.errors import BadRecords

SCHEMA = pa.schema(
    [
        ("source", pa.string()),
        ("file", pa.string()),
        ("line", pa.int64()),
        ("reason", pa.string()),
        ("sample", pa.string()),
    ]
)
SAMPLE = 200


class Quarantine:
    """Collects the bad records of a phase."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, str, int, str, str]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, source: str, file: str, line: int, reason: str, sample: Any) -> None:
        """Put a record away; `sample` is what was found, as text or as anything JSON can show."""
        text = sample if isinstance(sample, str) else json.dumps(sample, ensure_ascii=False, default=repr)
        # Lone surrogates have no UTF-8 form; the sample shows them as escapes.
        clipped = text[:SAMPLE].encode("utf-8", "backslashreplace").decode("utf-8")
        self._rows.append((source, file, line, reason.encode("utf-8", "backslashreplace").decode("utf-8"), clipped))

    def reasons(self, source: str | None = None) -> Counter[str]:
        """How often each kind of reason occurred."""
        return kinds(row[3] for row in self._rows if source in (None, row[0]))

    def save(self, path: Path) -> None:
        """Write them as parquet."""
        columns = zip(*self._rows, strict=True) if self._rows else [[] for _ in SCHEMA]
        arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
        write(path, pa.table(arrays, schema=SCHEMA))


def kinds(reasons: Iterable[str]) -> Counter[str]:
    """Reasons counted by kind: what stands before the first colon."""
    return Counter(reason.partition(":")[0] for reason in reasons)


def merge(paths: Iterable[Path], target: Path) -> int:
    """One file of many; returns its rows."""
    table = pa.concat_tables([pq.read_table(path) for path in paths]).combine_chunks()
    write(target, table)
    return int(table.num_rows)


def check_ratio(read: int, reasons: Counter[str], limit: float, where: str) -> None:
    """Stop where too many records are bad.

    Raises:
        BadRecords: more than `limit` of the records read went to quarantine; names the commonest reasons.
    """
    bad = reasons.total()
    if read and bad / read > limit:
        top = "; ".join(f"{reason} ({count})" for reason, count in reasons.most_common(5))
        raise BadRecords(
            f"{bad} of {read} records are bad ({bad / read:.1%}); data.max_bad_ratio allows {limit:.1%}. "
            f"Commonest: {top}. Each is in {where}. Mend the source, or raise data.max_bad_ratio."
        )
