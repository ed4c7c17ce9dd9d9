"""A query as a source, in a real PostgreSQL behind a network that breaks."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from corpus import database, readers
from refit.errors import BadInput, ServerUnavailable
from standalone.environment import database_url
from standalone.ports import HOST, Ports
from tests.postgres import running
from tests.proxy import breaking

pytestmark = pytest.mark.integration

CRM = "sql://crm"
PASSWORD = "pa/ss word-s3cr3t"
WHERE = "data.sources[0] (tickets)"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ports]:
    with running(tmp_path_factory.mktemp("server")) as (home, ports):
        url = database_url("refit", ports)
        with psycopg.connect(url, passfile=str(home.pgpass), autocommit=True) as connection:
            connection.execute(f"ALTER ROLE refit PASSWORD '{PASSWORD}'")
            connection.execute(
                "CREATE TABLE tickets AS SELECT n, '我的订单 ' || n || ' 还没有到' AS question, "
                "CASE WHEN n % 3 = 0 THEN NULL ELSE repeat('答', 300) END AS reply, "
                "timestamptz '2026-01-01 00:00Z' + n * interval '1 minute' AS at, (n / 8.0)::numeric(12, 3) AS price "
                "FROM generate_series(1, 120000) n"
            )
        yield ports


@pytest.fixture
def crm(server: Ports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ports:
    monkeypatch.setenv("REFIT_CACHE", str(tmp_path / "cache"))
    point(monkeypatch, server.postgres)
    return server


def point(patch: pytest.MonkeyPatch, port: int) -> None:
    quoted = PASSWORD.replace("/", "%2F").replace(" ", "%20")
    patch.setenv("REFIT_CONNECTION_CRM", f"postgresql://refit:{quoted}@{HOST}:{port}/refit?sslmode=disable")


def rows(made: database.Extract) -> list[Any]:
    return [row for _, row in readers.read(made.path, database.FILE)]


def test_a_large_result_passes_through_little_memory_and_comes_whole(
    crm: Ports, monkeypatch: pytest.MonkeyPatch
) -> None:
    """120,000 rows, some 80 MB of lines. (What libpq holds is a batch: the cursor is the server's.)"""
    monkeypatch.setattr(database, "RUN_BYTES", 4 << 20)
    database.extract(CRM, "SELECT 1 AS n", WHERE)  # what is loaded once does not count
    tracemalloc.start()
    try:
        made = database.extract(CRM, "SELECT n, question, reply FROM tickets", WHERE)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 24 << 20
    found = rows(made)
    assert len(found) == len({row["n"] for row in found}) == 120_000
    assert {"n": 3, "question": "我的订单 3 还没有到", "reply": None} in found
    assert database.extract(CRM, "SELECT n, question, reply FROM tickets ORDER BY n DESC", WHERE).digest == made.digest


def test_the_server_holds_the_cursor_and_gives_a_batch_at_a_time(crm: Ports) -> None:
    with psycopg.connect(database_url_of(crm), password=PASSWORD, autocommit=True) as other:
        lines = database._lines(CRM, "SELECT n, question, reply FROM tickets", WHERE, lambda: None)
        next(lines)
        (statement,) = other.execute(
            "SELECT query FROM pg_stat_activity WHERE state = 'idle in transaction' AND usename = 'refit'"
        ).fetchone() or ("",)
        lines.close()  # type: ignore[attr-defined]
    assert statement.startswith("FETCH FORWARD 999 ")  # the first row is fetched by itself


def test_types_of_postgresql_become_what_json_can_say(crm: Ports) -> None:
    made = database.extract(
        CRM,
        "SELECT at, price, date '2026-02-03' AS day, true AS yes, '{\"好\": [1]}'::jsonb AS document, ARRAY['a', NULL] "
        "AS list, '6ba7b810-9dad-11d1-80b4-00c04fd430c8'::uuid AS id, NULL AS absent, '50% :x %s' AS odd "
        "FROM tickets WHERE n = 1;",
        WHERE,
    )
    assert rows(made) == [{
        "at": "2026-01-01T00:01:00+00:00", "price": "0.125", "day": "2026-02-03", "yes": True,
        "document": {"好": [1]}, "list": ["a", None], "id": "6ba7b810-9dad-11d1-80b4-00c04fd430c8", "absent": None,
        "odd": "50% :x %s",
    }]  # fmt: skip
    (fault,) = rows(database.extract(CRM, r"SELECT 1 AS n, '\x00ff'::bytea AS photo", WHERE))
    assert fault.reason.startswith("column photo: bytes is no text")


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ("SELECT missing FROM tickets", 'column "missing" does not exist'),
        ("SELECT 1 / (n - 100000) FROM tickets", "division by zero"),
        ("SELECT 1 AS a; DROP TABLE tickets", "multiple commands"),
        ("WITH gone AS (DELETE FROM tickets RETURNING n) SELECT n FROM gone", "data-modifying"),
        ("SELECT nextval('numbers')", "read-only transaction"),
        ("DROP TABLE tickets", "syntax error"),
    ],
)
def test_a_query_that_fails_names_the_source_and_says_what_the_database_says(
    crm: Ports, tmp_path: Path, query: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with psycopg.connect(database_url_of(crm), password=PASSWORD, autocommit=True) as other:
        other.execute("CREATE SEQUENCE IF NOT EXISTS numbers")
        with pytest.raises(BadInput, match=why) as caught:
            database.extract(CRM, query, WHERE)
        assert other.execute("SELECT count(*) FROM tickets").fetchone() == (120_000,)
    assert WHERE in str(caught.value)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert_no_password(str(caught.value), *capsys.readouterr())


def test_a_connection_that_breaks_in_the_middle_begins_anew(
    crm: Ports, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    query = "SELECT n, question FROM tickets"
    undisturbed = database.extract(CRM, query, WHERE)
    with breaking(HOST, crm.postgres, [400_000, 100]) as proxy:
        point(monkeypatch, proxy.port)
        made = database.extract(CRM, query, WHERE, pause=0)
        assert proxy.connections == 3
    assert made.digest == undisturbed.digest
    assert_no_password(*capsys.readouterr())


def test_a_database_that_stays_away_is_infrastructure_and_leaves_nothing(
    crm: Ports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with breaking(HOST, crm.postgres, [400_000] * 9) as proxy:
        point(monkeypatch, proxy.port)
        with pytest.raises(ServerUnavailable, match="after 4 attempts") as caught:
            database.extract(CRM, "SELECT n, question FROM tickets", WHERE, pause=0)
    assert WHERE in str(caught.value)
    assert caught.value.__cause__ is None
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert_no_password(str(caught.value), *capsys.readouterr())


def database_url_of(ports: Ports) -> str:
    return f"postgresql://refit@{HOST}:{ports.postgres}/refit"


def assert_no_password(*said: str) -> None:
    assert not any("s3cr3t" in text for text in said)
