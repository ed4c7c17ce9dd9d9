"""Files to rows: jsonl, a JSON array, csv, tsv, plain text, each also as gzip, bzip2 or zstd; parquet and arrow.

A reader yields (line, row); a row is what the file holds (a mapping, or a string of a plain text), or a `Fault` where
the place holds nothing that can be read. A fault never ends the reading where something readable may follow.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from corpus.encodings import SAMPLE_BYTES, detect, is_by_line
from corpus.span import Span

# A longer line is no record of a person's making; reading on is bounded by it.
MAX_LINE = 16 << 20
# Rows of a column file that are in memory at a time; one may be a megabyte.
COLUMN_ROWS = 256
SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt")
PACKED = (".gz", ".bz2", ".zst")
UNUSABLE = "!unusable "
"""Begins a line of jsonl that stands for a row that could not be written as one; why follows. JSON never begins so."""
MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\x28\xb5\x2f\xfd": "zstd"}


@dataclass(frozen=True)
class Fault:
    """What could not be read, and a sample of it."""

    reason: str
    sample: str = ""


Rows = Iterator[tuple[int, Any]]


def is_data(name: str) -> bool:
    """Whether a file of a folder is read: known by the end of its name."""
    return unpacked(name).endswith(SUFFIXES)


def unpacked(name: str) -> str:
    """A file's name without the ending of its packing."""
    return next((name.removesuffix(end) for end in PACKED if name.endswith(end)), name)


def read(path: Path, name: str, span: Span | None = None) -> Rows:
    """The rows of a file; `name` tells its kind, its first bytes its packing and its encoding.

    With a `span` (`corpus.cut` makes them) only those of that stretch of lines.
    """
    if span:
        with path.open("rb") as stream:
            stream.seek(span.start)
            yield from _jsonl(_decoded(stream, span.encoding, span))
        return
    with path.open("rb") as handle:
        head = handle.read(6)
    if head.startswith(b"PAR1"):
        yield from _columns(lambda: pq.ParquetFile(path).iter_batches(batch_size=COLUMN_ROWS), "parquet")
        return
    if head == b"ARROW1":
        yield from _columns(lambda: _arrow_batches(path), "arrow")
        return
    packing = next((packing for magic, packing in MAGIC.items() if head.startswith(magic)), "")
    line = 0
    try:
        with _opened(path, packing) as stream:
            start = _start(stream)
        with _opened(path, packing) as stream:
            for line, row in _text(stream, start, unpacked(name)):
                yield line, row
    except (EOFError, OSError, zlib.error) as error:
        if not packing:
            raise
        yield line + 1, Fault(f"the {packing} file breaks off: {error}")


def _opened(path: Path, packing: str) -> IO[bytes]:
    if packing == "gzip":
        return cast(IO[bytes], gzip.open(path))
    if packing == "bzip2":
        return bz2.open(path)
    if packing == "zstd":
        return cast(IO[bytes], io.BufferedReader(cast(Any, pa.CompressedInputStream(pa.OSFile(str(path)), "zstd"))))
    return path.open("rb")


def _start(stream: Any) -> bytes:
    """The first bytes of a stream; of one that breaks off before, those that there are."""
    start = b""
    try:
        while len(start) < SAMPLE_BYTES and (more := stream.read1(SAMPLE_BYTES)):
            start += more
    except (EOFError, OSError, zlib.error):
        pass  # who reads on meets it again, and says where
    return start


def _text(stream: IO[bytes], start: bytes, name: str) -> Rows:
    encoding = detect(start)
    if encoding == "utf-8" and b"\x00" in start[:64]:
        yield 1, Fault("binary: neither text nor parquet", repr(start[:32]))
        return
    if name.endswith((".csv", ".tsv")):
        yield from _csv(_decoded(stream, encoding), "\t" if name.endswith(".tsv") else ",")
    elif name.endswith(".txt"):
        yield from ((line, row) for line, row in _decoded(stream, encoding) if isinstance(row, Fault) or row.strip())
    elif _looks_like_array(start[:64], encoding):
        yield from _array(stream.read(), encoding)
    else:
        yield from _jsonl(_decoded(stream, encoding))


def _looks_like_array(start: bytes, encoding: str) -> bool:
    return start.decode(encoding, "ignore").lstrip("\ufeff \t\r\n").startswith("[")


def _decoded(stream: IO[bytes], encoding: str, span: Span | None = None) -> Rows:
    """Lines as text, cut at line feeds only: U+2028 and its like may stand inside a string."""
    if not is_by_line(encoding):
        try:
            yield from enumerate(io.StringIO(stream.read().decode(encoding), newline=None), start=1)
        except UnicodeDecodeError as error:
            yield 1, Fault(f"not {encoding.upper()}: {error.reason} at byte {error.start}")
        return
    number = span.line - 1 if span else 0
    while (not span or stream.tell() < span.stop) and (raw := stream.readline(MAX_LINE)):
        number += 1
        if len(raw) == MAX_LINE and not raw.endswith(b"\n"):
            while (more := stream.readline(MAX_LINE)) and not more.endswith(b"\n"):
                pass
            yield number, Fault(f"a line of more than {MAX_LINE >> 20} MiB", raw[:80].decode("utf-8", "replace"))
            continue
        try:
            text = raw.decode(encoding)
        except UnicodeDecodeError as error:
            yield (
                number,
                Fault(
                    f"not {encoding.upper()}: {error.reason} at byte {error.start}",
                    raw[:200].decode(encoding, "replace"),
                ),
            )
            continue
        yield number, text.removeprefix("\ufeff") if number == 1 else text


def _jsonl(lines: Rows) -> Rows:
    for number, text in lines:
        if isinstance(text, Fault):
            yield number, text
        elif not text.strip():
            continue
        elif text.startswith(UNUSABLE):
            yield number, Fault(text.removeprefix(UNUSABLE).strip())
        else:
            try:
                yield number, _DECODER.decode(text)
            except (ValueError, RecursionError) as error:
                yield number, Fault(_why(error), text)


def _array(data: bytes, encoding: str) -> Rows:
    """The elements of a JSON array; where one is broken, those before it stand."""
    try:
        text = data.decode(encoding).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        yield 1, Fault(f"not {encoding.upper()}: {error.reason} at byte {error.start}")
        return
    at, line, counted = _skip(text, text.index("[") + 1), 1, 0
    while at < len(text) and text[at] != "]":
        line, counted = line + text.count("\n", counted, at), at
        try:
            row, at = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            yield line, Fault(f"the JSON array breaks off: {_why(error)}", text[at : at + 200])
            return
        yield line, row
        at = _skip(text, at)
        if at < len(text) and text[at] == ",":
            at = _skip(text, at + 1)
        elif at < len(text) and text[at] != "]":
            yield line, Fault("the JSON array breaks off: no comma between elements", text[at : at + 200])
            return
    if at >= len(text):
        yield line, Fault("the JSON array breaks off: it is never closed")


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _csv(lines: Rows, delimiter: str) -> Rows:
    faults: list[tuple[int, Fault]] = []
    line = 0  # of the row in the making: a quoted cell may hold line breaks, and a row is where it begins

    def texts() -> Iterator[str]:
        nonlocal line
        for number, text in lines:
            if isinstance(text, Fault):
                faults.append((number, text))
            else:
                line = line or number
                yield text

    csv.field_size_limit(MAX_LINE)
    reader = csv.reader(texts(), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    while True:
        line = 0
        try:
            cells = next(reader)
        except StopIteration:
            break
        except csv.Error as error:
            yield line, Fault(f"not csv: {error}")
            continue
        if not cells:
            continue
        if header is None:
            header = [cell.strip() for cell in cells]
        elif len(cells) == len(header):
            yield line, dict(zip(header, cells, strict=True))
        else:
            yield line, Fault(f"wrong number of columns: {len(cells)}, the header has {len(header)}", " ".join(cells))
    yield from faults


def _columns(batches: Callable[[], Iterable[pa.RecordBatch]], kind: str) -> Rows:
    number = 0
    try:
        for batch in batches():
            for first in range(0, batch.num_rows, COLUMN_ROWS):
                for row in batch.slice(first, COLUMN_ROWS).to_pylist():
                    number += 1
                    yield number, row
    except (pa.ArrowException, OSError) as error:
        yield number + 1, Fault(f"the {kind} file cannot be read: {' '.join(str(error).split())[:150]}")


def _arrow_batches(path: Path) -> Iterator[pa.RecordBatch]:
    reader = pa.ipc.open_file(pa.memory_map(str(path)))
    return (reader.get_batch(number) for number in range(reader.num_record_batches))


def _why(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} (column {error.colno})"
    return str(error) if isinstance(error, ValueError) else "not JSON: nested too deeply"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen and seen[key] != value:
                raise ValueError(f"a key occurs twice with differing values: {key}")
            seen[key] = value
    return row


def _constant(name: str) -> Any:
    raise ValueError(f"not JSON: {name}")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant)
