"""`corpus dedup`: near duplicates of plain jsonl files, without a pipeline, as fast as the machine reads them.

A row has an `id` and a `text`. What is removed depends on the texts and their ids, never on the order of rows or files:
a cluster is named by its lowest id, and the row of that id stays.
"""

from __future__ import annotations

import os
import time
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from corpus import letters, lsh, readers, warm
from corpus.encodings import SAMPLE_BYTES, detect
from corpus.lsh import Index
from corpus.quarantine import Quarantine
from corpus.shelf import Shelf, ahead
from corpus.shingles import Texts
from corpus.span import Span
from refit import files
from refit.errors import BadInput
from refit.spec import Dedup

CLUSTERS, KEPT, QUARANTINE = "clusters.parquet", "kept.parquet", "quarantine.parquet"
SYNC_SECONDS = 0.05
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
    with TemporaryDirectory() as scratch, Shelf(Path(scratch, "texts")) as shelf:
        with Quarantine(Path(scratch, QUARANTINE)) as quarantine:
            for path in inputs:
                _add(path, shelf, quarantine)
        kernels.join()
        _require_rows(shelf, inputs, quarantine)
        files.write(output / QUARANTINE, Path(scratch, QUARANTINE).read_bytes())
        found = lsh.clusters(ahead(_compared(shelf)), settings, lambda wanted: ahead(_picked(shelf, wanted)))
        ids = shelf.ids
        keeper = _keepers(found.root, ids)
        stays = keeper == np.arange(len(keeper))
        clusters = pa.table({"id": ids, "cluster": ids.take(pa.array(keeper))})
        _write(output / CLUSTERS, clusters.schema, clusters.to_batches())
        _write(output / KEPT, SCHEMA, ahead(_staying(shelf, stays)))
    seconds = time.perf_counter() - started
    return {
        "documents": len(keeper),
        "kept": int(stays.sum()),
        "clusters": int(stays.sum()),
        "quarantined": len(quarantine),
        "candidate_pairs": found.candidate_pairs,
        "verified_pairs": found.verified_pairs,
        "seconds": seconds,
        "documents_per_second": len(keeper) / seconds,
        "peak_memory_bytes": _peak_memory(),
    }


def _peak_memory() -> int:
    """This process's own peak; getrusage's would count what its parent had when it started us."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM:")).split()[1]) * 1024


def _compared(shelf: Shelf) -> Iterator[Texts]:
    """All texts as they are compared."""
    return (letters.lowered(shelf.texts(block)) for block in shelf.blocks)


def _picked(shelf: Shelf, wanted: Index) -> Iterator[Texts]:
    """Those of these numbers."""
    return (letters.lowered(shelf.texts(block, rows)) for block, rows in shelf.picked(wanted))


def _add(path: Path, shelf: Shelf, quarantine: Quarantine) -> None:
    """A file's rows; what cannot be read is set aside."""
    if not path.is_file():
        raise BadInput(f"{path}: there is no such file.")

    def read(span: Span | None = None) -> Iterator[tuple[str, str]]:
        for line, row in readers.read(path, path.name, span):
            fault = _fault(row)
            if fault:
                quarantine.add(path.stem, path.name, line, fault, row.sample if isinstance(row, readers.Fault) else row)
            else:
                yield str(row["id"]), row["text"]

    if _is_plain(path):
        shelf.add_lines(path, read)
    else:
        shelf.add_rows(read())


def _is_plain(path: Path) -> bool:
    """Whether a file is lines of JSON in UTF-8; one that begins with an object is, whatever it is called."""
    with path.open("rb") as handle:
        start = handle.read(SAMPLE_BYTES)
    first = start.removeprefix(BOM_UTF8).lstrip()[:1]
    if first == b"[" or b"\0" in start[:64] or start.startswith((*readers.MAGIC, b"PAR1", b"ARROW1")):
        return False
    return (first == b"{" or not path.name.endswith((".csv", ".tsv", ".txt"))) and detect(start) == "utf-8"


def _fault(row: Any) -> str | None:
    if isinstance(row, readers.Fault):
        return row.reason
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        return "no text: a row is an object with an id and a text"
    if not isinstance(row.get("id"), str | int) or isinstance(row.get("id"), bool):
        return "no id: a row is an object with an id and a text"
    for name in ("text", "id"):
        if not _is_unicode(str(row[name])):
            return f"half a surrogate pair: the {name} is no Unicode"
    return None


def _is_unicode(text: str) -> bool:
    return text.isascii() or not any(0xD800 <= ord(character) <= 0xDFFF for character in text)


def _require_rows(shelf: Shelf, inputs: Sequence[Path], quarantine: Quarantine) -> None:
    if not len(shelf):
        why = "; ".join(f"{reason} ({count})" for reason, count in quarantine.worst().items())
        raise BadInput(f"{', '.join(map(str, inputs))}: no row can be read. {why or 'The files are empty.'}")
    if (twice := shelf.repeated_id()) is not None:
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


def _staying(shelf: Shelf, stays: NDArray[np.bool_]) -> Iterator[pa.RecordBatch]:
    """The rows that stay, a block at a time."""
    for block, rows in shelf.picked(np.flatnonzero(stays)):
        yield pa.RecordBatch.from_arrays([block.ids.take(pa.array(rows)), shelf.texts(block, rows)], schema=SCHEMA)


def _write(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    """A parquet file that is there whole or not at all; not packed, since that takes as long as all the rest of it."""
    with (
        files.replacing(path) as draft,
        pq.ParquetWriter(draft, schema, compression="none", use_dictionary=False, write_statistics=False) as writer,
        _synced(draft),
    ):
        for batch in batches:
            writer.write_batch(batch)


@contextmanager
def _synced(path: Path) -> Iterator[None]:
    """Bring what is written to a file to the disk all the while: it is slower than we are, and would rest till the end.

    An error of the disk is told to who syncs first: it is raised here.
    """
    done = Event()

    def sync() -> None:
        with path.open("rb") as handle:
            while not done.wait(SYNC_SECONDS):
                os.fdatasync(handle.fileno())

    with ThreadPoolExecutor(1) as pool:
        syncing = pool.submit(sync)
        try:
            yield
        finally:
            done.set()
        syncing.result()
