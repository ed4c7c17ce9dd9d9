"""`corpus dedup`: near duplicates of plain jsonl files, without a pipeline, as fast as the machine reads them.

A row has an `id` and a `text`. What is removed depends on the texts and their ids, never on the order of rows or files:
a cluster is named by its lowest id, and the row of that id stays.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj
import pyarrow.parquet as pq
from numpy.typing import NDArray

from corpus import letters, lsh, readers, warm
from corpus.lsh import Index
from corpus.quarantine import Quarantine
from refit import files
from refit.errors import BadInput
from refit.spec import Dedup

CLUSTERS, KEPT, QUARANTINE = "clusters.parquet", "kept.parquet", "quarantine.parquet"
BLOCK_BYTES = 8 << 20
SCHEMA = pa.schema([pa.field("id", pa.string()), pa.field("text", pa.large_string())])


def dedup_files(inputs: Sequence[Path], output: Path, settings: Dedup) -> dict[str, Any]:
    """Cluster the rows of all files; write what belongs together, what stays, and what could not be read.

    Returns:
        Counts, and what it cost: `seconds` from the first byte read to the last byte written.

    Raises:
        BadInput: a file is missing, no row can be read, or an id occurs twice.
    """
    started = time.perf_counter()
    kernels = Thread(target=warm.clusters)  # fetched from disk, or compiled, while the files are read
    kernels.start()
    with TemporaryDirectory() as scratch:
        with Quarantine(Path(scratch, QUARANTINE)) as quarantine:
            table = pa.concat_tables([_read(path, quarantine) for path in inputs])
        kernels.join()
        ids = table.column("id")
        _require_rows(table, ids, inputs, quarantine)
        files.write(output / QUARANTINE, Path(scratch, QUARANTINE).read_bytes())
    found = lsh.clusters([letters.lowered(chunk) for chunk in table.column("text").chunks], settings)
    keeper = _keepers(found.root, ids)
    stays = keeper == np.arange(len(keeper))
    clusters = pa.table({"id": ids, "cluster": ids.take(pa.array(keeper))})
    _write(output / CLUSTERS, clusters.schema, clusters.to_batches())
    _write(output / KEPT, table.schema, _staying(table, stays))
    seconds = time.perf_counter() - started
    return {
        "documents": table.num_rows,
        "kept": int(stays.sum()),
        "clusters": int(stays.sum()),
        "quarantined": len(quarantine),
        "candidate_pairs": found.candidate_pairs,
        "verified_pairs": found.verified_pairs,
        "seconds": seconds,
        "documents_per_second": table.num_rows / seconds,
        "peak_memory_bytes": _peak_memory(),
    }


def _peak_memory() -> int:
    """This process's own peak; getrusage's would count what its parent had when it started us."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM:")).split()[1]) * 1024


def _read(path: Path, quarantine: Quarantine) -> pa.Table:
    """A file's rows: by Arrow where every line is as it should be, else line by line, the bad ones set aside."""
    if not path.is_file():
        raise BadInput(f"{path}: there is no such file.")
    try:
        table = pj.read_json(
            path,
            pj.ReadOptions(block_size=BLOCK_BYTES),
            pj.ParseOptions(explicit_schema=SCHEMA, unexpected_field_behavior="ignore"),
        )
        table.validate(full=True)  # the reader takes any bytes for UTF-8
    except (pa.ArrowException, OSError):
        return _read_by_line(path, quarantine)
    if any(column.null_count for column in table.columns):
        return _read_by_line(path, quarantine)
    return table.select(SCHEMA.names)


def _read_by_line(path: Path, quarantine: Quarantine) -> pa.Table:
    def good() -> Iterator[tuple[str, str]]:
        for line, row in readers.read(path, path.name):
            fault = _fault(row)
            if fault:
                quarantine.add(path.stem, path.name, line, fault, row.sample if isinstance(row, readers.Fault) else row)
            else:
                yield str(row["id"]), row["text"]

    rows = list(good())
    columns = zip(*rows, strict=True) if rows else ([], [])
    return pa.table(
        [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)], schema=SCHEMA
    )


def _fault(row: Any) -> str | None:
    if isinstance(row, readers.Fault):
        return row.reason
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        return "no text: a row is an object with an id and a text"
    if not isinstance(row.get("id"), str | int) or isinstance(row.get("id"), bool):
        return "no id: a row is an object with an id and a text"
    if not row["text"].isascii() and any(0xD800 <= ord(character) <= 0xDFFF for character in row["text"]):
        return "half a surrogate pair: the text is no Unicode"
    return None


def _require_rows(table: pa.Table, ids: pa.ChunkedArray, inputs: Sequence[Path], quarantine: Quarantine) -> None:
    if not table.num_rows:
        why = "; ".join(f"{reason} ({count})" for reason, count in quarantine.worst().items())
        raise BadInput(f"{', '.join(map(str, inputs))}: no row can be read. {why or 'The files are empty.'}")
    if pc.count_distinct(ids).as_py() < table.num_rows:
        counts = pc.value_counts(ids)
        twice = counts.filter(pc.greater(counts.field("counts"), 1)).field("values")[0].as_py()
        raise BadInput(f"the id {twice!r} occurs more than once; ids name rows, give each its own.")


def _keepers(root: Index, ids: pa.ChunkedArray) -> Index:
    """For each row the row of the lowest id in its cluster."""
    keeper = root.copy()
    gone = np.flatnonzero(root != np.arange(len(root)))
    linked = np.union1d(gone, root[gone])
    names = np.array(ids.take(pa.array(linked)).to_pylist(), object)
    order = linked[np.argsort(names, kind="stable")] if len(linked) else linked
    lowest: dict[int, int] = {}
    for row in order.tolist():
        keeper[row] = lowest.setdefault(int(root[row]), row)
    return keeper


def _staying(table: pa.Table, stays: NDArray[np.bool_]) -> Iterator[pa.RecordBatch]:
    """The rows that stay, a batch at a time: a copy of all of them would double the memory."""
    first = 0
    for batch in table.to_batches():
        yield batch.filter(pa.array(stays[first : first + batch.num_rows]))
        first += batch.num_rows


def _write(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    """A parquet file that is there whole or not at all; not packed, since that takes as long as all the rest of it."""
    with (
        files.replacing(path) as draft,
        pq.ParquetWriter(draft, schema, compression="none", use_dictionary=False, write_statistics=False) as writer,
    ):
        for batch in batches:
            writer.write_batch(batch)
