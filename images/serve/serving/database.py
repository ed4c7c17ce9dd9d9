"""Postgres, as the serving programs use it: short questions with short patience, and life goes on without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.rows import dict_row

from refit.errors import ServerUnavailable

Row = dict[str, Any]
Connection = psycopg.Connection[Row]

# A database that hangs must not hang those who ask it: nothing here waits longer than a few seconds.
_PATIENCE: dict[str, Any] = {
    "connect_timeout": 3,
    "options": "-c statement_timeout=8000 -c lock_timeout=4000",
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 8000,
}


class Database:
    """One connection, made when it is needed and again after it broke. Not for two threads at once."""

    def __init__(self, url: str | None, name: str) -> None:
        self._url = url
        self._name = name
        self._connection: Connection | None = None
        self._marked: Connection | None = None

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """A transaction on the connection.

        Raises:
            ServerUnavailable: there is no database, or it does not answer. A statement that is wrong raises as it is.
        """
        if self._url is None:
            raise ServerUnavailable("REFIT_DATABASE_URL is not set, so there is no database to ask.")
        try:
            if self._connection is None or self._connection.closed:
                self._connection = psycopg.connect(
                    self._url, row_factory=dict_row, autocommit=True, application_name=self._name, **_PATIENCE
                )
            with self._connection.transaction():
                yield self._connection
        except (psycopg.OperationalError, psycopg.errors.UndefinedTable) as error:
            # A database without its tables is one that is only being set up.
            self.close()
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ServerUnavailable(f"the database does not answer: {first}") from error

    def mark(self) -> None:
        """Remember this very connection: it holds something that ends with it (a lock)."""
        self._marked = self._connection

    def marked(self) -> bool:
        """Whether the connection is still the one that was marked."""
        return self._connection is not None and self._connection is self._marked

    def close(self) -> None:
        """Let the connection go."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
