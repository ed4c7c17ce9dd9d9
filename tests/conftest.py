"""A real PostgreSQL with Refit's tables. Imported only where it is asked for: not all tests run where it is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def postgres_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """Its home and ports; it ends with the session."""
    from refit.proc import Identity, kill_tree, spawn
    from standalone import postgres, probes
    from standalone.environment import database_url
    from standalone.home import Home
    from standalone.migrate import migrate
    from standalone.ports import free_ports

    home, ports = Home(tmp_path_factory.mktemp("server")), free_ports()
    home.make_folders()
    home.make_secrets()
    postgres.make_cluster(home)
    with (home.logs / "postgres.log").open("wb") as log:
        child = spawn(postgres.server_argv(home, ports), cwd="/", stdout=log)
    identity = Identity.of(child.pid)
    try:
        deadline = time.monotonic() + 60
        while probes.postgres(home, ports, 0.0) and time.monotonic() < deadline:
            time.sleep(0.1)
        postgres.make_databases(home, ports)
        migrate(database_url("refit", ports), passfile=home.pgpass)
        yield home, ports
    finally:
        kill_tree(identity)
        child.wait()


@pytest.fixture
def database(postgres_server: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A connection to its tables, empty, which are Refit's database for as long as the test runs."""
    import psycopg

    from standalone.environment import database_url

    home, ports = postgres_server
    monkeypatch.setenv("REFIT_DATABASE_URL", database_url("refit", ports))
    monkeypatch.setenv("PGPASSFILE", str(home.pgpass))
    with psycopg.connect(database_url("refit", ports), autocommit=True) as connection:
        connection.execute("TRUNCATE jobs, job_events, evaluations, runs, alerts, quarantines CASCADE")
        yield connection
