"""Phase 1, ingest: deliveries of any format become canonical records; what cannot goes to quarantine and says why."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import xxhash

from corpus import formats, readers, record, tools
from corpus.quarantine import Quarantine
from corpus.record import Bad, Record
from corpus.settings import IngestSettings, SourceSettings
from corpus.task import QUARANTINE, RECORDS, Facts, Task
from refit.errors import BadInput, BadRecords


def run(task: Task) -> Facts:
    """Read every file of every source.

    Raises:
        BadInput: a source holds no rows.
        BadRecords: a source holds rows and none is a record.
    """
    settings: IngestSettings = task.settings
    quarantine = Quarantine()
    records: list[Record] = []
    counts: dict[str, dict[str, int]] = {}
    ids: Counter[str] = Counter()
    for index, source in enumerate(settings.sources):
        before = len(records)
        seen = 0
        for name in [role for role in task.inputs if role.startswith(f"{source.name}/")]:
            file = name.removeprefix(f"{source.name}/")
            for line, row in readers.read(task.inputs[name], file):
                if settings.max_records is not None and seen >= settings.max_records:
                    break
                seen += 1
                try:
                    records.append(_record(row, source, file, line, settings, ids))
                except Bad as bad:
                    sample = row.sample if isinstance(row, readers.Fault) else row
                    quarantine.add(source.name, file, line, str(bad), sample)
                task.progress(len(records) + len(quarantine), 0)
        counts[source.name] = {"read": seen, "kept": len(records) - before}
        _must_hold_records(index, source, seen, len(records) - before, quarantine)
    record.write(task.folder / RECORDS, record.to_table(records))
    quarantine.save(task.folder / QUARANTINE)
    return {
        "records_in": len(records) + len(quarantine),
        "records_out": len(records),
        "quarantined": len(quarantine),
        "reasons": dict(quarantine.reasons()),
        "sources": counts,
    }


def _record(
    row: Any, source: SourceSettings, file: str, line: int, settings: IngestSettings, ids: Counter[str]
) -> Record:
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
    # Named by content: a delivery in another order gives the same names, and the same exam later.
    name = xxhash.xxh3_128_hexdigest(f"{source.name}\0{session or ''}\0{text}".encode())
    ids[name] += 1
    return Record(
        id=name if ids[name] == 1 else f"{name}.{ids[name]}", source=source.name, file=file, line=line,
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


def _must_hold_records(index: int, source: SourceSettings, seen: int, kept: int, quarantine: Quarantine) -> None:
    where = f"data.sources[{index}] ({source.name})"
    if seen == 0:
        raise BadInput(f"{where}: 0 rows. Deliver the data, or remove the source.")
    if kept == 0:
        reasons = "; ".join(f"{why} ({count})" for why, count in quarantine.reasons(source.name).most_common(3))
        raise BadRecords(
            f"{where}: none of its {seen} rows is a record of format {source.format}. Why: {reasons}. "
            "Check the file, the format and the columns."
        )
