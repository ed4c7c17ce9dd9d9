"""SQL migrations against a real PostgreSQL from the wheel, without the rest of the stack."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from refit.errors import BadInput
from refit.proc import Identity, kill_tree, spawn
from standalone import postgres, probes
from standalone.environment import database_url
from standalone.home import Home
from standalone.migrate import migrate, migrations
from standalone.ports import HOST, Ports, free_ports

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Home, Ports]]:
    home, ports = Home(tmp_path_factory.mktemp("server")), free_ports()
    home.make_folders()
    home.make_secrets()
    assert postgres.make_cluster(home) is True
    assert postgres.make_cluster(home) is False
    with (home.logs / "postgres.log").open("wb") as log:
        child = spawn(postgres.server_argv(home, ports), cwd="/", stdout=log)
    identity = Identity.of(child.pid)
    try:
        deadline = time.monotonic() + 60
        while (problem := probes.postgres(home, ports, 0.0)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert problem is None
        postgres.make_databases(home, ports)
        postgres.make_databases(home, ports)
        yield home, ports
    finally:
        kill_tree(identity)
        child.wait()


class Database:
    """A fresh, empty database, and a folder of migrations for it."""

    def __init__(self, home: Home, ports: Ports, folder: Path) -> None:
        name = "t" + folder.name.replace("-", "_").lower()[-40:]
        self._login = {
            "host": HOST, "port": ports.postgres, "user": "postgres", "password": home.secret("postgres-postgres")
        }  # fmt: skip
        with self.connect("postgres") as connection:
            connection.execute(f'CREATE DATABASE "{name}" OWNER refit'.encode())
        self.name = name
        self.folder = folder
        self._url = database_url("refit", ports).rsplit("/", 1)[0] + f"/{name}"
        self._pgpass = home.pgpass

    def connect(self, name: str | None = None) -> psycopg.Connection[tuple[object, ...]]:
        return psycopg.connect(**self._login, dbname=name or self.name, autocommit=True)  # type: ignore[arg-type]

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def migrate(self) -> list[str]:
        return migrate(self._url, passfile=self._pgpass, directory=self.folder)

    def tables(self) -> set[str]:
        with self.connect() as connection:
            rows = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
            return {str(name) for (name,) in rows} - {"schema_migrations"}


@pytest.fixture
def database(server: tuple[Home, Ports], tmp_path: Path) -> Database:
    return Database(*server, tmp_path)


def test_migrations_apply_in_order_and_once(database: Database) -> None:
    database.write("0002_more.sql", "ALTER TABLE one ADD COLUMN two int; CREATE TABLE three (a int REFERENCES one);")
    database.write("0001_first.sql", "CREATE TABLE one (a int PRIMARY KEY);")
    assert database.migrate() == ["0001_first.sql", "0002_more.sql"]
    assert database.tables() == {"one", "three"}
    assert database.migrate() == []


def test_a_failing_migration_leaves_nothing_of_itself(database: Database) -> None:
    database.write("0001_first.sql", "CREATE TABLE one (a int);")
    database.write("0002_broken.sql", "CREATE TABLE two (a int); SELECT 1/0;")
    with pytest.raises(psycopg.errors.DivisionByZero):
        database.migrate()
    assert database.tables() == {"one"}
    database.write("0002_broken.sql", "CREATE TABLE two (a int);")
    assert database.migrate() == ["0002_broken.sql"]


def test_a_file_that_changed_after_it_was_applied_is_refused(database: Database) -> None:
    database.write("0001_first.sql", "CREATE TABLE one (a int);")
    database.migrate()
    database.write("0001_first.sql", "CREATE TABLE one (a int, b int);")
    with pytest.raises(BadInput, match=r"0001_first\.sql was changed after it was applied"):
        database.migrate()


def test_a_database_that_is_ahead_of_the_checkout_is_refused(database: Database) -> None:
    database.write("0001_first.sql", "CREATE TABLE one (a int);")
    database.write("0002_more.sql", "CREATE TABLE two (a int);")
    database.migrate()
    (database.folder / "0002_more.sql").unlink()
    with pytest.raises(BadInput, match=r"has migration 0002_more\.sql, which this checkout lacks"):
        database.migrate()


def test_a_number_before_an_applied_one_is_refused(database: Database) -> None:
    database.write("0002_more.sql", "CREATE TABLE two (a int);")
    database.migrate()
    database.write("0001_late.sql", "CREATE TABLE one (a int);")
    with pytest.raises(BadInput, match=r"0001_late\.sql comes before 0002"):
        database.migrate()


def test_the_projects_own_migrations_apply_to_an_empty_database(database: Database) -> None:
    for migration in migrations():
        database.write(migration.name, migration.text)
    assert database.migrate() == [migration.name for migration in migrations()]
    assert len(database.tables()) > 5


def test_a_misnamed_or_doubled_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "first.sql").write_text("SELECT 1")
    with pytest.raises(BadInput, match=r"first\.sql: a migration is named like 0001_"):
        migrations(tmp_path)
    (tmp_path / "first.sql").rename(tmp_path / "0001_a.sql")
    (tmp_path / "0001_b.sql").write_text("SELECT 1")
    with pytest.raises(BadInput, match=r"0001_b\.sql: number 0001 is also 0001_a\.sql"):
        migrations(tmp_path)
