"""Bad records: never fatal by themselves, never lost. Each is kept with its origin, a reason, and a clipped sample."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from corpus.record import writer
from refit.errors import BadInput, BadRecords

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
BATCH = 8192


class Quarantine:
    """Collects the bad records of a phase into a file, a batch at a time: there may be more than fit into memory."""

    def __init__(self, path: Path) -> None:
        self._file = writer(path, SCHEMA)
        self._rows: list[tuple[str, str, int, str, str]] = []
        self._reasons: dict[str, Counter[str]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._flush()
        self._file.close()

    def __len__(self) -> int:
        return sum(counts.total() for counts in self._reasons.values())

    def add(self, source: str, file: str, line: int, reason: str, sample: Any) -> None:
        """Put a record away; `sample` is what was found, as text or as anything JSON can show."""
        text = sample if isinstance(sample, str) else json.dumps(sample, ensure_ascii=False, default=repr)
        # Lone surrogates have no UTF-8 form; the sample shows them as escapes.
        clipped = text[:SAMPLE].encode("utf-8", "backslashreplace").decode("utf-8")
        self._rows.append((source, file, line, reason.encode("utf-8", "backslashreplace").decode("utf-8"), clipped))
        self._reasons.setdefault(source, Counter()).update(kinds([reason]))
        if len(self._rows) >= BATCH:
            self._flush()

    def reasons(self) -> dict[str, int]:
        """How often each kind of reason occurred."""
        return dict(sum(self._reasons.values(), Counter()))

    def worst(self) -> dict[str, int]:
        """The three commonest kinds."""
        return dict(Counter(self.reasons()).most_common(3))

    def by_source(self) -> dict[str, dict[str, int]]:
        """The same, by source."""
        return {source: dict(counts) for source, counts in self._reasons.items()}

    def _flush(self) -> None:
        if self._rows:
            columns = zip(*self._rows, strict=True)
            arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
            self._file.write_table(pa.table(arrays, schema=SCHEMA))
            self._rows.clear()


def kinds(reasons: Iterable[str]) -> Counter[str]:
    """Reasons counted by kind: what stands before the first colon."""
    return Counter(reason.partition(":")[0] for reason in reasons)


def merge(paths: Iterable[Path], target: Path) -> None:
    """One file of many."""
    with writer(target, SCHEMA) as merged:
        for path in paths:
            for batch in pq.ParquetFile(path).iter_batches():
                merged.write_batch(batch)


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


def check_sources(sources: Iterable[tuple[str, str]], facts: Mapping[str, Any], where: str) -> None:
    """Stop where a source (its name and format) has given nothing; `facts` are ingest's.

    Raises:
        BadInput: a source holds no rows.
        BadRecords: a source holds rows and none is a record.
    """
    for index, (name, format) in enumerate(sources):
        counts, place = facts["sources"][name], f"data.sources[{index}] ({name})"
        if counts["read"] == 0:
            raise BadInput(f"{place}: 0 rows. Deliver the data, or remove the source.")
        if counts["kept"] == 0:
            worst = Counter(facts["bad"][name]).most_common(3)
            reasons = "; ".join(f"{why} ({count})" for why, count in worst)
            raise BadRecords(
                f"{place}: none of its {counts['read']} rows is a record of format {format}. Why: {reasons}. "
                f"Each is in {where}. Check the file, the format and the columns."
            )
