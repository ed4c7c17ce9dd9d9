"""Phase 1, ingest: deliveries of any format become canonical records; what cannot goes to quarantine and says why."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

import xxhash

from corpus import formats, readers, record, tools
from corpus.quarantine import Quarantine
from corpus.record import GROUP_BYTES, GROUP_ROWS, Bad, Record
from corpus.settings import IngestSettings, SourceSettings
from corpus.task import QUARANTINE, RECORDS, Facts, Task


def run(task: Task) -> Facts:
    """Read the files of a shard, in their order; all are of one source."""
    settings: IngestSettings = task.settings
    (source,) = settings.sources
    seen = kept = 0
    with Quarantine(task.folder / QUARANTINE) as quarantine, record.writer(task.folder / RECORDS) as out:
        group: list[Record] = []
        size = 0
        for seen, (file, line, row) in enumerate(islice(_rows(task), settings.max_records), start=1):
            try:
                found = _record(row, source, file, line, settings)
            except Bad as bad:
                quarantine.add(source.name, file, line, str(bad), row.sample if isinstance(row, readers.Fault) else row)
                continue
            group.append(found)
            size += len(found.messages)
            if len(group) == GROUP_ROWS or size >= GROUP_BYTES:
                out.write_table(record.to_table(group))
                kept, group, size = kept + len(group), [], 0
                task.progress(seen, 0)
        if group:
            out.write_table(record.to_table(group))
    kept += len(group)
    return {
        "records_in": seen,
        "records_out": kept,
        "quarantined": len(quarantine),
        "reasons": quarantine.reasons(),
        "bad": quarantine.by_source(),
        "sources": {source.name: {"read": seen, "kept": kept}},
    }


def _rows(task: Task) -> Iterator[tuple[str, int, Any]]:
    """(file, line, row) of every row of the shard."""
    for role, path in task.inputs.items():
        span = task.spans.get(role)
        file = role.rpartition("@")[0] if span else role
        for line, row in readers.read(path, file, span):
            yield file, line, row


def _record(row: Any, source: SourceSettings, file: str, line: int, settings: IngestSettings) -> Record:
    if isinstance(row, readers.Fault):
        raise Bad(row.reason)
    messages = formats.conversation(row, source.format, source.columns)
    record.check(messages)
    of_task = source.role == "task"
    if of_task and settings.system and messages[0]["role"] not in ("system", record.TEXT):
        messages = [{"role": "system", "content": settings.system}, *messages]
    elif of_task and settings.system and messages[0]["role"] == "system":
        content = tools.with_system(settings.system, messages[0]["content"])
        messages = [{**messages[0], "content": content}, *messages[1:]]
    text = record.dump(messages)
    session, user, time = (_attribute(row, source.columns.get(name, name)) for name in ("session", "user", "time"))
    return Record(
        # Named by content: a delivery in another order gives the same names, and the same exam later.
        id=xxhash.xxh3_128_hexdigest(f"{source.name}\0{session or ''}\0".encode() + text),
        source=source.name, file=file, line=line,
        session=session, user=user, domain=source.domain or source.name,
        label=_label(record.answer(messages), settings.label_key) if of_task else None, time=time, messages=text,
    )  # fmt: skip


def _attribute(row: Any, key: str) -> str | None:
    value = row.get(key) if isinstance(row, dict) else None
    if value is None or value == "":
        return None
    return str(value).encode("utf-8", "replace").decode()


def _label(answer: str, key: str | None) -> str | None:
    if key is None:
        return None
    try:
        value = json.loads(answer)[key]
    except (ValueError, KeyError, TypeError) as error:
        raise Bad(f"the answer is not JSON with {key!r}") from error
    if value is None:
        raise Bad(f"the answer's {key!r} is null")
    return str(value)
