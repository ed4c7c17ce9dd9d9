"""A real PostgreSQL with Refit's tables, and an S3. Imported only where asked for: not all tests run where they are."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

if importlib.util.find_spec("hypothesis"):
    import hypothesis

    # A busy machine is slow, and nothing here is wrong for that.
    hypothesis.settings.register_profile("refit", deadline=None)
    hypothesis.settings.load_profile("refit")


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


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """An S3 of our own: moto's server, which has the conditional writes that the store's fences rest on."""
    server_module = pytest.importorskip("moto.server")
    boto3 = pytest.importorskip("boto3")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            patch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket="refit")
        yield "s3://refit"
    server.stop()
