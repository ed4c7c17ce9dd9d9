"""answers.parquet: one row an item asked, with what was asked, answered and measured. What a comparison reads."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from evaluator.exam import BUSINESS, GENERAL, Item
from evaluator.metrics import METRICS, predicted_label
from evaluator.server import Answer
from refit.errors import BadInput
from refit.spec import Evaluate
from refit.statistics import Floats, Interval, wilson

FILE = "answers.parquet"
SCHEMA = pa.schema(
    [
        ("set", pa.string()), ("id", pa.string()), ("digest", pa.string()), ("domain", pa.string()),
        ("user", pa.string()), ("messages", pa.string()), ("reference", pa.string()), ("label", pa.string()),
        ("answer", pa.string()), ("predicted", pa.string()), ("finish", pa.string()), ("refused", pa.string()),
        ("seconds", pa.float64()), ("tokens", pa.int64()),
    ]
)  # fmt: skip


@dataclass(frozen=True)
class Answers:
    """The rows of an evaluation, in the exam's order."""

    rows: Sequence[Mapping[str, Any]]

    @classmethod
    def of(cls, items: Iterable[Item], answers: Mapping[tuple[str, str], Answer], spec: Evaluate) -> Answers:
        """Score every answer with every metric."""
        return cls([_row(item, answers[item.key], spec) for item in items])

    @classmethod
    def read(cls, path: Path) -> Answers:
        """The rows of a file.

        Raises:
            BadInput: it cannot be read.
        """
        try:
            return cls(pq.read_table(path).to_pylist())
        except (OSError, ValueError) as error:
            raise BadInput(f"{path}: answers cannot be read: {error}. Give the folder of an evaluation.") from error

    def parquet(self) -> bytes:
        """The file's bytes."""
        schema = SCHEMA
        for name in METRICS:
            schema = schema.append(pa.field(name, pa.bool_()))
        sink = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(list(self.rows), schema=schema), sink, compression="zstd")
        return sink.getvalue()

    def of_set(self, name: str) -> Answers:
        """Those of one set."""
        return Answers([row for row in self.rows if row["set"] == name])

    def by_domain(self) -> dict[str, Answers]:
        """Those of each domain, domains in order of name."""
        names = sorted({row["domain"] for row in self.rows})
        return {name: Answers([row for row in self.rows if row["domain"] == name]) for name in names}

    def scores(self, metric: str) -> Floats:
        """A metric's values; NaN where one is missing."""
        return np.array([np.nan if row.get(metric) is None else float(row[metric]) for row in self.rows])

    def share(self, metric: str, confidence: float) -> Interval:
        """A metric's share of 1 with its interval."""
        scores = self.scores(metric)
        if np.isnan(scores).any():
            return Interval(np.nan, np.nan, np.nan)
        return wilson(int(scores.sum()), scores.size, confidence)

    def confusion(self) -> dict[str, dict[str, int]]:
        """Right label → answered label → items; what could not be read counts as "" ."""
        counts: dict[str, dict[str, int]] = {}
        for row in self.rows:
            if row["label"] is not None:
                said = counts.setdefault(row["label"], {})
                answer = row["predicted"] or ""
                said[answer] = said.get(answer, 0) + 1
        return counts


def facts(answers: Answers, confidence: float) -> dict[str, Any]:
    """The figures of one release, for its manifest: every share with its interval."""
    business, general = answers.of_set(BUSINESS), answers.of_set(GENERAL)
    seconds = np.array([row["seconds"] for row in answers.rows])
    return {
        "items": len(business.rows),
        "accuracy": business.share("correct", confidence).facts(),
        "validity": business.share("valid", confidence).facts(),
        "metrics": {name: business.share(name, confidence).facts() for name in METRICS},
        "domains": _domains(business, confidence),
        "confusion": business.confusion(),
        "refused": sum(bool(row["refused"]) for row in answers.rows),
        "general": {
            "items": len(general.rows),
            **general.share("correct", confidence).facts(),
            "domains": _domains(general, confidence),
        }
        if general.rows
        else None,
        "latency": {f"p{q}": float(np.quantile(seconds, q / 100)) for q in (50, 95)},
        "tokens": sum(row["tokens"] for row in answers.rows),
    }


def _domains(answers: Answers, confidence: float) -> dict[str, Any]:
    return {
        name: {"items": len(part.rows), **part.share("correct", confidence).facts()}
        for name, part in answers.by_domain().items()
    }


def _row(item: Item, answer: Answer, spec: Evaluate) -> dict[str, Any]:
    return {
        "set": item.set, "id": item.id, "digest": item.digest, "domain": item.domain, "user": item.user,
        "messages": json.dumps([dict(message) for message in item.messages], ensure_ascii=False),
        "reference": item.reference, "label": item.label, "answer": answer.text,
        "predicted": predicted_label(answer.text, spec) if item.check is None else None, "finish": answer.finish,
        "refused": answer.refused, "seconds": answer.seconds, "tokens": answer.tokens,
        **{name: measure(item, answer.text, spec) for name, measure in METRICS.items()},
    }  # fmt: skip
