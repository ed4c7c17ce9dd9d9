"""The controller's memory on its own disk: written first (fsync), told to Postgres later, read after a restart.

    rollouts/<id>/plan.json       what was asked
    rollouts/<id>/journal.jsonl   what happened, one entry a line, numbered
    rollouts/champions.jsonl      every change of a champion, each with a key of its own

A line that a kill cut short was not acted upon, and is passed over.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from refit import files
from refit.release import Release
from serving.rollout import Entry, Plan, Rollout, replay

Model = TypeVar("Model", bound=BaseModel)


class Change(BaseModel):
    """A new champion."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    pipeline: str
    champion: Release
    previous: Release | None
    rollout: str | None
    reason: str
    actor: str
    at: float


class Journal:
    """The journals of all rollouts, and the champions' history."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def start(self, plan: Plan) -> None:
        """Remember what a rollout is to be."""
        files.write(self._of(plan.id) / "plan.json", plan.model_dump_json(indent=1).encode(), mode=0o600)

    def add(self, rollout: str, entry: Entry) -> None:
        """Append an entry; on return it survives a power cut."""
        _append(self._of(rollout) / "journal.jsonl", entry.model_dump_json().encode())

    def entries(self, rollout: str) -> list[Entry]:
        """What happened, in order."""
        return list(_lines(self._of(rollout) / "journal.jsonl", Entry))

    def rollouts(self) -> dict[str, Rollout]:
        """Every rollout as its journal tells it, by id, oldest first."""
        found = {}
        for path in sorted(self._folder.glob("*/plan.json")):
            plan = Plan.model_validate_json(path.read_bytes())
            found[plan.id] = replay(plan, self.entries(plan.id))
        return dict(sorted(found.items(), key=lambda item: item[1].started_at))

    def change(self, change: Change) -> None:
        """Append a change of champion."""
        _append(self._folder / "champions.jsonl", change.model_dump_json().encode())

    def changes(self) -> list[Change]:
        """Every change of champion, in order; a key that a repeated write left twice counts once."""
        return list({change.key: change for change in _lines(self._folder / "champions.jsonl", Change)}.values())

    def _of(self, rollout: str) -> Path:
        return self._folder / rollout


def _append(path: Path, line: bytes) -> None:
    files.append(path, line)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    files.sync_folder(path.parent)


def _lines(path: Path, model: type[Model]) -> Iterator[Model]:
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return
    for line in text.splitlines():
        with suppress(ValidationError):
            yield model.model_validate_json(line)
