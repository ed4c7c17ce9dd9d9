"""The numbered migrations of `sql/migrations/`: each is applied once, in order, in a transaction of its own.

What was applied is recorded with its hash. A file that changed after it was applied is refused: the database would not
be what the file says. To change a table, add a file with the next number.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

import psycopg

from refit.errors import BadInput
from refit.sql import folder

_NAME = re.compile(r"^(\d{4})_[a-z0-9_]+\.sql$")
_LOCK = 0x5EF17  # an advisory lock's number: two starters must not migrate at once

_TABLE = """
CREATE TABLE IF NOT EXISTS schema_migrations (
    version text PRIMARY KEY, name text NOT NULL, sha256 text NOT NULL, applied_at timestamptz NOT NULL DEFAULT now()
)
"""


@dataclass(frozen=True, slots=True)
class Migration:
    """One file: its number, its name, its statements."""

    version: str
    name: str
    text: str

    @property
    def sha256(self) -> str:
        """What the database remembers of it."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def migrations(directory: Path | None = None) -> list[Migration]:
    """The migrations in order.

    Raises:
        BadInput: a file is not named like `0001_words.sql`, or a number is used twice.
    """
    found: dict[str, Migration] = {}
    for path in sorted((directory or folder() / "migrations").glob("*.sql")):
        match = _NAME.match(path.name)
        if match is None:
            raise BadInput(f"{path}: a migration is named like 0001_first_tables.sql; rename it.")
        if match[1] in found:
            raise BadInput(f"{path}: number {match[1]} is also {found[match[1]].name}; take the next free number.")
        found[match[1]] = Migration(match[1], path.name, path.read_text(encoding="utf-8"))
    return list(found.values())


def migrate(url: str, *, passfile: Path | None = None, directory: Path | None = None) -> list[str]:
    """Bring the database up to the files; returns the names of those that were applied now.

    Raises:
        BadInput: an applied file was changed or is gone, or a new one is numbered before an applied one.
    """
    wanted = migrations(directory)
    applied_now = []
    with psycopg.connect(url, passfile=str(passfile or ""), autocommit=True) as connection:
        connection.execute("SELECT pg_advisory_lock(%s)", [_LOCK])  # freed when the connection closes
        connection.execute(_TABLE)
        rows = connection.execute("SELECT version, name, sha256 FROM schema_migrations ORDER BY version").fetchall()
        applied = {version: (name, sha256) for version, name, sha256 in rows}
        _refuse_changes(wanted, applied)
        for migration in wanted:
            if migration.version in applied:
                continue
            with connection.transaction():
                connection.execute(migration.text.encode())  # bytes: the file is ours, and has several statements
                connection.execute(
                    "INSERT INTO schema_migrations (version, name, sha256) VALUES (%s, %s, %s)",
                    [migration.version, migration.name, migration.sha256],
                )
            applied_now.append(migration.name)
    return applied_now


def _refuse_changes(wanted: list[Migration], applied: dict[str, tuple[str, str]]) -> None:
    known = {migration.version: migration for migration in wanted}
    for version, (name, sha256) in applied.items():
        if version not in known:
            raise BadInput(f"the database has migration {name}, which this checkout lacks; use the one that has it.")
        if known[version].sha256 != sha256:
            raise BadInput(f"{known[version].name} was changed after it was applied; undo that and add a new one.")
    newest = max(applied, default="")
    for migration in wanted:
        if migration.version not in applied and migration.version < newest:
            raise BadInput(f"{migration.name} comes before {newest}, which is applied; give it the next number.")
