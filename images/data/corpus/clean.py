"""Phase 2, clean: the spec's rules over every turn that a person or a model wrote, in the spec's order.

The stage does for all rules alike what rules know nothing of: files, counters, quarantine.
"""

from __future__ import annotations

from collections import Counter

import pyarrow as pa

from corpus import record, rules, tools
from corpus.quarantine import Quarantine
from corpus.record import Message
from corpus.rules import Drop, Step
from corpus.settings import CleanSettings
from corpus.task import QUARANTINE, RECORDS, Facts, Task

WITHHELD = "(withheld: what it says is a secret)"


def run(task: Task) -> Facts:
    """Apply the rules; a record goes as a whole when one of its turns goes."""
    settings: CleanSettings = task.settings
    steps = rules.build(settings.rules)
    table = record.read(task.inputs["records"] / RECORDS)
    quarantine = Quarantine()
    counts = {step.name: Counter(kept=0, changed=0, dropped=0) for step in steps}
    kept: list[int] = []
    texts: list[str] = []
    columns = [table.column(name).to_pylist() for name in ("source", "file", "line", "messages")]
    for row, (source, file, line, text) in enumerate(zip(*columns, strict=True)):
        messages = record.load(text)
        dropped = _apply(steps, messages, counts)
        if dropped:
            said = " / ".join(message["content"] for message in messages)
            name, drop = dropped
            quarantine.add(source, file, line, f"{name}: {drop.why}", WITHHELD if drop.withheld else said)
        else:
            kept.append(row)
            texts.append(record.dump(messages))
        task.progress(row + 1, table.num_rows)
    cleaned = table.take(pa.array(kept, pa.int64()))
    place = cleaned.schema.get_field_index("messages")
    cleaned = cleaned.set_column(place, table.schema.field("messages"), pa.array(texts, pa.string()))
    record.write(task.folder / RECORDS, cleaned)
    quarantine.save(task.folder / QUARANTINE)
    return {
        "records_in": table.num_rows,
        "records_out": len(kept),
        "quarantined": len(quarantine),
        "reasons": dict(quarantine.reasons()),
        "rules": {name: dict(count) for name, count in counts.items()},
    }


def _apply(steps: list[Step], messages: list[Message], counts: dict[str, Counter[str]]) -> tuple[str, Drop] | None:
    """Change the messages in place; the rule and its word where the record has to go. A record counts once a rule."""
    for step in steps:
        changed = False
        for message in messages:
            if message["role"] == "system" or tools.is_call(message["content"]):
                continue
            verdict = step.apply(message["content"])
            if isinstance(verdict, Drop):
                counts[step.name]["dropped"] += 1
                return step.name, verdict
            if verdict is not None:
                message["content"] = verdict
                changed = True
        counts[step.name]["changed" if changed else "kept"] += 1
    return None
