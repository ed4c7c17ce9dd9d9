"""Phase 2, clean: the spec's rules over every turn that a person or a model wrote, in the spec's order.

The stage does for all rules alike what rules know nothing of: files, counters, quarantine. What is left is normalised
once (`corpus.said`), for the phases that compare texts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from corpus import record, rules, said, score, tools
from corpus.quarantine import Quarantine
from corpus.record import Message
from corpus.rules import Drop, Step
from corpus.settings import CleanSettings
from corpus.shingles import Texts
from corpus.task import QUARANTINE, RECORDS, Facts, Task
from refit.spec import ScoreLimits

Turn = tuple[Message, str]
"""A message, and under which of its keys the text is."""

WITHHELD = "(withheld: what it says is a secret)"


def run(task: Task) -> Facts:
    """Apply the rules to a shard; a record goes as a whole when one of its turns goes."""
    settings: CleanSettings = task.settings
    steps = rules.build(settings.rules)
    judge = _Judge.of(task, settings)
    counts = {step.name: Counter(kept=0, changed=0, dropped=0) for step in steps}
    given = pq.ParquetFile(task.inputs["records"] / RECORDS)
    seen = kept = 0
    with (
        Quarantine(task.folder / QUARANTINE) as quarantine,
        record.writer(task.folder / RECORDS) as out,
        said.Writer(task.folder) as texts,
    ):
        for group in range(given.num_row_groups):
            table = given.read_row_group(group)
            cleaned = _cleaned(steps, table, counts, quarantine)
            places, conversations, quality = judge.kept(table, *cleaned, quarantine)
            out.write_table(_replaced(table.take(pa.array(places, pa.int64())), conversations))
            texts.write(table.column("source")[0].as_py(), conversations, quality)
            seen, kept = seen + table.num_rows, kept + len(places)
            task.progress(seen, given.metadata.num_rows)
    return {
        "records_in": seen,
        "records_out": kept,
        "quarantined": len(quarantine),
        "reasons": quarantine.reasons(),
        "rules": {name: dict(count) for name, count in counts.items()},
        "scored": {"kept": kept, "dropped": judge.dropped} if judge.model else {},
    }


def merge(lines: Mapping[str, Sequence[Path]], folder: Path) -> None:
    """Write what all shards of a source tell: which lines are its form."""
    said.write_forms(lines, folder)


@dataclass
class _Judge:
    """What the line's model makes of the records that the rules left, where the line names one."""

    model: score.Model | None
    limits: ScoreLimits
    dropped: int = 0

    @classmethod
    def of(cls, task: Task, settings: CleanSettings) -> _Judge:
        return cls(score.load(task.inputs["score"]) if "score" in task.inputs else None, settings.score)

    def kept(
        self, table: pa.Table, places: list[int], conversations: list[list[Message]], quarantine: Quarantine
    ) -> tuple[list[int], list[list[Message]], list[float | None]]:
        """Those rows and conversations that are good enough, weighed, with their quality; the rest is quarantined."""
        if self.model is None:
            return places, conversations, [None] * len(places)
        scores = score.score(self.model, [score.text_of(messages) for messages in conversations])
        verdicts = score.judge(scores, self.limits)
        for row, messages, verdict in zip(places, conversations, verdicts, strict=True):
            if verdict.drop:
                source, file, line = (table.column(name)[row].as_py() for name in ("source", "file", "line"))
                quarantine.add(source, file, line, verdict.drop, score.text_of(messages))
            else:
                score.weigh(messages, verdict.weight)
        stay = [at for at, verdict in enumerate(verdicts) if verdict.drop is None]
        self.dropped += len(places) - len(stay)
        # Three places: a difference that nobody can see must not decide who stays.
        grades = [None if math.isnan(grade) else round(grade, 3) for grade in scores.quality[stay].tolist()]
        return [places[at] for at in stay], [conversations[at] for at in stay], grades


def _cleaned(
    steps: list[Step], table: pa.Table, counts: dict[str, Counter[str]], quarantine: Quarantine
) -> tuple[list[int], list[list[Message]]]:
    """The numbers of the rows that stay, and what is left of each."""
    conversations = [record.load(text) for text in table.column("messages").to_pylist()]
    turns = [_turns(messages) for messages in conversations]
    suspects = _suspects(steps, turns)
    places, left = [], []
    for row, messages in enumerate(conversations):
        dropped = _apply(steps, turns[row], [which is None or row in which for which in suspects], counts)
        if dropped:
            name, drop = dropped
            sample = " / ".join(message["content"] for message in messages)
            source, file, line = (table.column(name)[row].as_py() for name in ("source", "file", "line"))
            quarantine.add(source, file, line, f"{name}: {drop.why}", WITHHELD if drop.withheld else sample)
        else:
            places.append(row)
            left.append(messages)
    return places, left


def _turns(messages: list[Message]) -> list[Turn]:
    """The texts that rules judge: what a person or a model wrote, not what a program did."""
    return [
        (message, key)
        for message in messages
        if message["role"] != "system" and not tools.is_call(message["content"])
        for key in ("content", record.REJECTED)
        if key in message
    ]


def _suspects(steps: list[Step], turns: list[list[Turn]]) -> list[set[int] | None]:
    """Of each rule the rows that it has to look at, as they came; none said where it has to look at all of them."""
    if not any(step.clear for step in steps):
        return [None] * len(steps)
    texts = Texts.of([message[key] for own in turns for message, key in own])
    rows = np.repeat(np.arange(len(turns)), [len(own) for own in turns])
    return [set(rows[~step.clear(texts)].tolist()) if step.clear else None for step in steps]


def _replaced(table: pa.Table, conversations: list[list[Message]]) -> pa.Table:
    """The rows with what is left of their conversations."""
    place = table.schema.get_field_index("messages")
    texts = pa.array(map(record.dump, conversations), pa.string())
    return table.set_column(place, table.schema.field(place), texts)


def _apply(
    steps: list[Step], turns: list[Turn], suspect: list[bool], counts: dict[str, Counter[str]]
) -> tuple[str, Drop] | None:
    """Change the turns in place; the rule and its word where the record has to go. A record counts once a rule."""
    ever = False  # what was changed is not what the rules after it were asked about
    for step, wanted in zip(steps, suspect, strict=True):
        changed = False
        for message, key in turns if wanted or ever else ():
            verdict = step.apply(message[key])
            if isinstance(verdict, Drop):
                # What is wrong with a rejected answer may be why it was rejected; a secret is one wherever it stands.
                if key == record.REJECTED and not verdict.withheld:
                    continue
                counts[step.name]["dropped"] += 1
                return step.name, verdict
            if verdict is not None:
                message[key] = verdict
                changed = ever = True
        counts[step.name]["changed" if changed else "kept"] += 1
    return None
