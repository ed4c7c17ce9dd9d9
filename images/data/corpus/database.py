"""A query as a source: its rows are written to one file, which from then on is a delivery like any other.

The rows come through a server-side cursor, a batch at a time, in a transaction that may only read, and are never all
in memory. A database owes no order where a query gives none (and few queries give a total one), so the lines of the
extract are sorted: the same rows have the same bytes and the same digest, and a run of which nothing else changed is
answered from its folders. `ORDER BY` therefore decides only together with a `LIMIT` in the query; `data.max_records`
takes the first in the order of the lines.

What it does not do: change data, run more than one statement, keep a half-read result. A connection that is lost in
the middle begins the query anew.
"""

from __future__ import annotations

import datetime
import heapq
import io
import json
import sqlite3
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import pyarrow as pa
import sqlalchemy
from sqlalchemy import exc

from corpus.readers import UNUSABLE
from corpus.signs import beating
from refit import connections, files, fingerprint, log
from refit.errors import BadInput, ServerUnavailable
from refit.store import Heard, cache_folder, unheard

FILE = "query.jsonl.zst"
"""What the extract is called among a source's files."""
BATCH = 1000
"""Rows that are fetched at once."""
RUN_BYTES = 64 << 20
"""Lines that are sorted in memory at once; more are merged from disk."""
ATTEMPTS = 4
KEPT = 3
"""Extracts of one query that stay on this machine: another run may still read the last ones."""

_LOST = ("08", "40", "53")  # SQLSTATE classes: connection, rolled back (a standby's conflict), no resources
_SHUT_DOWN = ("57P01", "57P02", "57P03")
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


@dataclass(frozen=True)
class Extract:
    """The rows of a query on this machine's disk; `digest` follows from the rows alone."""

    path: Path
    digest: str


class _Lost(Exception):
    """The database went away; the message has no secret in it."""


def extract(uri: str, query: str, where: str, *, pause: float = 1.0, heard: Heard = unheard) -> Extract:
    """Run a query and keep what it returns.

    Args:
        uri: `sql://NAME`, a connection.
        query: one statement that returns rows.
        where: names the source in messages.
        heard: called as rows come.
        pause: seconds before the second attempt; doubled before each further one.

    Raises:
        BadInput: the connection is not known, or the database refuses the query.
        ServerUnavailable: the database does not answer, or went away each time.
    """
    wrong = connections.fault(uri)
    if wrong:
        raise BadInput(f"{where}: uri is {uri!r}: {wrong}")
    folder = cache_folder() / "queries" / fingerprint.digest([uri, query])[:32]
    folder.mkdir(parents=True, exist_ok=True)
    why = ""
    for attempt in range(ATTEMPTS):
        if attempt:
            log.event("query_again", connection=uri, attempt=attempt + 1, why=why)
            time.sleep(pause * 2 ** (attempt - 1))
        try:
            return _extract(uri, query, where, folder, heard)
        except _Lost as lost:
            why = str(lost)
    raise ServerUnavailable(f"{where}: {uri} does not answer after {ATTEMPTS} attempts: {why}")


def _extract(uri: str, query: str, where: str, folder: Path, heard: Heard) -> Extract:
    with tempfile.TemporaryDirectory(dir=folder, prefix=".draft-") as draft:
        made = Path(draft) / FILE
        count = _write_sorted(_lines(uri, query, where, heard), made)
        digest = fingerprint.file_digest(made)
        final = folder / f"{digest}.jsonl.zst"
        with files.replacing(final) as place:
            made.rename(place)
    files.keep_newest(folder, KEPT)
    log.event("query", connection=uri, rows=count, digest=digest)
    return Extract(final, digest)


def _lines(uri: str, query: str, where: str, heard: Heard) -> Iterator[bytes]:
    """A line of JSON for each row; a row that JSON cannot say becomes a line that goes to quarantine."""
    given = connections.url(uri)
    try:
        engine = _engine(given)
        with engine.connect() as connection:
            options = {"stream_results": True, "max_row_buffer": BATCH, "no_parameters": True}
            with beating(heard):  # it may think for long before the first row
                result = connection.execution_options(**options).exec_driver_sql(query.strip().removesuffix(";"))
            if not result.returns_rows:
                raise BadInput(f"{where}: the query returns no rows; give one SELECT.")
            names = list(result.keys())
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise BadInput(f"{where}: the query returns {', '.join(twice)} twice; name columns apart with AS.")
            for batch in result.partitions(BATCH):  # without the number PostgreSQL is asked for all
                yield from (_line(names, row) for row in batch)
                heard()
    except exc.DBAPIError as error:
        said = _redacted(" ".join(str(error.orig).split()), given)
        if _is_lost(error):
            raise _Lost(said) from None  # the cause may hold what is redacted here
        raise BadInput(f"{where}: the database refuses the query: {said}. Mend data.sources' query.") from None
    except (exc.SQLAlchemyError, ValueError) as error:
        said = _redacted(" ".join(str(error).split()), given)
        raise BadInput(f"{where}: {connections.variable(uri)} cannot be used: {said}") from None
    except sqlite3.Error as error:  # what the driver itself raises while it connects
        raise BadInput(f"{where}: {uri}: {_redacted(str(error), given)}") from None


def _engine(given: str) -> sqlalchemy.Engine:
    """An engine that can only read."""
    address = sqlalchemy.make_url(given.replace("postgres://", "postgresql://", 1))
    if address.get_backend_name() == "sqlite":
        return sqlalchemy.create_engine("sqlite://", creator=lambda: _sqlite(address), poolclass=sqlalchemy.NullPool)
    engine = sqlalchemy.create_engine(
        address.set(drivername="postgresql+psycopg"), poolclass=sqlalchemy.NullPool, hide_parameters=True,
        connect_args={} if "connect_timeout" in address.query else {"connect_timeout": 10}, use_native_hstore=False,
    )  # fmt: skip
    return engine.execution_options(postgresql_readonly=True)


def _sqlite(address: sqlalchemy.URL) -> sqlite3.Connection:
    if not address.database or not Path(address.database).is_file():
        raise sqlite3.OperationalError("there is no such database file")
    connection = sqlite3.connect(f"file:{quote(address.database)}?mode=ro", uri=True)
    # Text that is not UTF-8 would end the query; so it ends the row.
    connection.text_factory = lambda raw: raw.decode("utf-8", "surrogateescape")
    return connection


def _is_lost(error: exc.DBAPIError) -> bool:
    """Whether the same query may work a moment later."""
    code = getattr(error.orig, "sqlite_errorcode", None)
    if code is not None or isinstance(error.orig, sqlite3.Error):
        return code is not None and (code & 0xFF) in _BUSY
    state = getattr(error.orig, "sqlstate", None)
    if state:
        return state[:2] in _LOST or state in _SHUT_DOWN
    return isinstance(error, exc.OperationalError)  # libpq has no state for a connection that never was, or broke


def _redacted(said: str, given: str) -> str:
    """A driver's words without the secrets of the URL, should it repeat them."""
    parts = urlsplit(given)
    secrets = [given, parts.password or "", *(value for name, value in parse_qsl(parts.query) if "pass" in name)]
    for secret in secrets:
        for form in filter(None, (secret, unquote(secret), quote(secret, safe=""))):
            said = said.replace(form, "***")
    return said


def _line(names: list[str], row: Iterable[Any]) -> bytes:
    """A row as a line of JSON: dates as ISO 8601, exact numbers as text, NULL as null."""
    values = dict(zip(names, row, strict=True))
    try:
        said = json.dumps(values, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=_plain)
        return said.encode() + b"\n"
    except (TypeError, ValueError) as error:  # UnicodeEncodeError is a ValueError
        name = next((name for name, value in values.items() if not _is_sayable(value)), "?")
        return f"{UNUSABLE}column {name}: {_why(error)}".encode("utf-8", "backslashreplace") + b"\n"


def _plain(value: Any) -> Any:
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, uuid.UUID | datetime.timedelta):
        return str(value)
    raise TypeError(f"{type(value).__name__} is no text; cast it in the query, or leave the column out")


def _is_sayable(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain).encode()
    except (TypeError, ValueError):
        return False
    return True


def _why(error: Exception) -> str:
    return "text that is not UTF-8" if isinstance(error, UnicodeEncodeError) else str(error).splitlines()[0]


def _write_sorted(lines: Iterable[bytes], target: Path) -> int:
    """Write lines in the order of their bytes, in bounded memory: sorted runs on disk, merged. Returns how many."""
    runs: list[Path] = []
    held: list[bytes] = []
    size = count = 0
    for line in lines:
        held.append(line)
        size += len(line)
        count += 1
        if size >= RUN_BYTES:
            runs.append(_write(target.with_name(f"run-{len(runs)}"), sorted(held)))
            held, size = [], 0
    with ExitStack() as stack:
        streams = [stack.enter_context(_opened(run)) for run in runs]
        _write(target, heapq.merge(*streams, sorted(held)))
    for run in runs:
        run.unlink()
    return count


def _write(path: Path, lines: Iterable[bytes]) -> Path:
    with pa.CompressedOutputStream(str(path), "zstd") as packed, io.BufferedWriter(packed, 1 << 20) as stream:
        stream.writelines(lines)
    return path


def _opened(path: Path) -> io.BufferedReader:
    return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(str(path)), "zstd"), 1 << 18)
