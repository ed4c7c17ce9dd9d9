"""A real PostgreSQL with Refit's tables. Imported only where it is asked for: not all tests run where it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def postgres_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """Its home and ports; it ends with the session."""
    from standalone.environment import database_url
    from standalone.migrate import migrate
    from tests.postgres import running

    with running(tmp_path_factory.mktemp("server")) as (home, ports):
        migrate(database_url("refit", ports), passfile=home.pgpass)
        yield home, ports


@pytest.fixture
def database(postgres_server: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A connection to its tables, empty, which are Refit's database for as long as the test runs."""
    import psycopg

    from standalone.environment import database_url

    home, ports = postgres_server
    monkeypatch.setenv("REFIT_DATABASE_URL", database_url("refit", ports))
    monkeypatch.setenv("PGPASSFILE", str(home.pgpass))
    with psycopg.connect(database_url("refit", ports), autocommit=True) as connection:
        connection.execute("TRUNCATE jobs, job_events, evaluations, runs, alerts, quarantines, nodes CASCADE")
        yield connection
