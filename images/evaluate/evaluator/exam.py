"""The exam: which items a release is asked. Held-out business items of the dataset, and a small general set.

An item knows its messages and what a right answer is, never how it is asked. Two evaluations can be compared only
where their items are the same, so each item carries the digest of its question and of what counts as right.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from refit import fingerprint
from refit.errors import BadInput
from refit.spec import Evaluate

BUSINESS, GENERAL = "business", "general"
HELDOUT = "heldout.parquet"
COLUMNS = ("id", "user", "domain", "label", "messages", "answer")


@dataclass(frozen=True, kw_only=True)
class Item:
    """A question. `label` where an answer is a label; `check` where a rule says what is right (general items)."""

    set: str
    id: str
    domain: str
    messages: tuple[Mapping[str, str], ...]
    reference: str
    user: str | None = None
    label: str | None = None
    check: Mapping[str, Any] | None = None

    @property
    def key(self) -> tuple[str, str]:
        """Names the item in its exam."""
        return self.set, self.id

    @property
    def digest(self) -> str:
        """Of the question and of what is right: the same item in two evaluations has the same digest."""
        parts = {"messages": self.messages, "reference": self.reference, "label": self.label, "check": self.check}
        return fingerprint.digest(parts)[:16]


def exam(heldout: Path, spec: Evaluate) -> list[Item]:
    """Every item of the sets that the spec asks for, in a stable order."""
    return business_items(heldout, spec.max_items) + (general_items() if spec.general else [])


def business_items(path: Path, at_most: int) -> list[Item]:
    """The held-out items with the lowest hash of their id: the same ones each time, and mostly so as data grows.

    Raises:
        BadInput: there is no such file, or it is not what the data stage writes.
    """
    try:
        rows = pq.read_table(path, columns=list(COLUMNS)).to_pylist()
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(f"{path}: held-out items cannot be read: {error}. Give the folder that `pack` made.") from error
    if not rows:
        raise BadInput(f"{path}: 0 held-out items; nothing can be measured. Raise data.split.heldout or deliver more.")
    if len({row["id"] for row in rows}) < len(rows):
        raise BadInput(f"{path}: ids occur twice; an item must be one row. Prepare the data again.")
    rows.sort(key=lambda row: hashlib.sha256(str(row["id"]).encode()).digest())
    return [_business_item(path, row) for row in rows[:at_most]]


def _business_item(path: Path, row: Mapping[str, Any]) -> Item:
    try:
        messages = tuple(json.loads(row["messages"]))
    except (TypeError, ValueError) as error:
        raise BadInput(f"{path}: item {row['id']}: messages are not JSON: {error}. Prepare the data again.") from error
    return Item(
        set=BUSINESS, id=row["id"], user=row["user"], domain=row["domain"] or "all", label=row["label"],
        messages=messages, reference=row["answer"] or "",
    )  # fmt: skip


def general_items() -> list[Item]:
    """The committed set that shows whether a retrained model still does what any model should."""
    text = resources.files("evaluator").joinpath("sets", "general.jsonl").read_text(encoding="utf-8")
    items = []
    for row in map(json.loads, text.splitlines()):
        message = {"role": "user", "content": row["prompt"]}
        [wanted] = row["check"].values()
        reference = wanted if isinstance(wanted, str) else ", ".join(wanted)
        items.append(
            Item(
                set=GENERAL, id=row["id"], domain=row["domain"], messages=(message,), reference=reference,
                check=row["check"],
            )
        )  # fmt: skip
    return items
