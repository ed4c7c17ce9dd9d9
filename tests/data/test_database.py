"""A query as a source, on SQLite; tests/integration/test_database_source.py asks PostgreSQL."""

from __future__ import annotations

import json
import random
import sqlite3
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from corpus import database, readers
from refit.errors import BadInput, BadSpec, ServerUnavailable
from refit.form import overrides_schema
from refit.pipeline import check_sources, load, validate

if TYPE_CHECKING:
    from tests.data.conftest import Line

CRM = "sql://crm"


@pytest.fixture
def crm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[sqlite3.Connection]:
    """An SQLite database that the connection `crm` names."""
    monkeypatch.setenv("REFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("REFIT_CONNECTION_CRM", f"sqlite:///{tmp_path}/crm.db")
    connection = sqlite3.connect(tmp_path / "crm.db", isolation_level=None)
    yield connection
    connection.close()


def rows(query: str) -> list[Any]:
    made = database.extract(CRM, query, "data.sources[0] (mail)")
    return [row for _, row in readers.read(made.path, database.FILE)]


def test_values_become_what_json_can_say(crm: sqlite3.Connection) -> None:
    found = rows("SELECT 1 AS n, 2.5 AS x, '你好\n世界' AS text, NULL AS absent, '100%:name' AS odd;")
    assert found == [{"n": 1, "x": 2.5, "text": "你好\n世界", "absent": None, "odd": "100%:name"}]


def test_a_row_that_cannot_be_said_goes_to_quarantine_and_the_others_do_not(crm: sqlite3.Connection) -> None:
    crm.execute("CREATE TABLE t (a, b)")
    values = [("good", 1), ("bytes", b"\x00"), ("infinite", 9e999), (None, None)]
    crm.executemany("INSERT INTO t VALUES (?, ?)", values)
    crm.execute("INSERT INTO t VALUES ('no text', CAST(x'ff' AS TEXT))")
    found = rows("SELECT a, b FROM t")
    faults = sorted(row.reason for row in found if isinstance(row, readers.Fault))
    assert [row["a"] for row in found if not isinstance(row, readers.Fault)] == ["good", None]
    assert faults[0].startswith("column b: Out of range float")
    assert faults[1].startswith("column b: bytes is no text")
    assert faults[2] == "column b: text that is not UTF-8"


def test_the_same_rows_in_another_order_have_the_same_bytes(
    crm: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    crm.execute("CREATE TABLE t (n, text)")
    numbers = list(range(600))
    random.Random(1).shuffle(numbers)
    crm.execute("BEGIN")
    crm.executemany("INSERT INTO t VALUES (?, ?)", [(number, f"text {number}") for number in numbers])
    crm.execute("COMMIT")
    whole = database.extract(CRM, "SELECT n, text FROM t", "x")
    monkeypatch.setattr(database, "RUN_BYTES", 4_000)  # many sorted runs, merged
    for order in ("n", "n DESC", "text"):
        assert database.extract(CRM, f"SELECT n, text FROM t ORDER BY {order}", "x").digest == whole.digest
    crm.execute("UPDATE t SET text = 'other' WHERE n = 7")
    assert database.extract(CRM, "SELECT n, text FROM t", "x").digest != whole.digest


def test_the_rows_are_never_all_in_memory(crm: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """120,000 rows of 1 KB: 120 MB of lines pass through less than 16 MB."""
    monkeypatch.setattr(database, "RUN_BYTES", 4 << 20)
    query = (
        "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c WHERE n < 120000) "
        "SELECT n, printf('%01000d', n) AS text FROM c"
    )
    crm.execute("PRAGMA user_version = 1")  # a file without a page is none
    database.extract(CRM, "SELECT 1 AS n", "x")  # what is loaded once does not count
    tracemalloc.start()
    try:
        made = database.extract(CRM, query, "x")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20
    assert sum(1 for _ in readers.read(made.path, database.FILE)) == 120_000


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ("SELECT a FROM nowhere", "no such table: nowhere"),
        ("SELECT 1; DROP TABLE t", "one statement at a time"),
        ("DELETE FROM t", "readonly database"),
        ("CREATE TABLE u (a)", "readonly database"),
        ("SELECT 1 AS a, 2 AS a", "returns a twice"),
        ("SAVEPOINT s", "no rows"),
    ],
)
def test_a_query_that_cannot_be_asked_names_the_source_and_what_the_database_says(
    crm: sqlite3.Connection, tmp_path: Path, query: str, why: str
) -> None:
    crm.execute("CREATE TABLE t (a)")
    with pytest.raises(BadInput, match=why) as caught:
        rows(query)
    assert "data.sources[0] (mail)" in str(caught.value)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert crm.execute("SELECT count(*) FROM t").fetchone() == (0,)


def test_a_busy_database_is_asked_again_and_then_given_up(
    crm: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    crm.execute("CREATE TABLE t (a)")
    crm.execute("BEGIN EXCLUSIVE")
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *given, **more: connect(*given, **more, timeout=0))
    with pytest.raises(ServerUnavailable, match=r"4 attempts.*locked"):
        database.extract(CRM, "SELECT a FROM t", "x", pause=0)
    crm.execute("COMMIT")
    assert rows("SELECT count(*) AS n FROM t") == [{"n": 0}]


def test_extracts_do_not_pile_up(crm: sqlite3.Connection, tmp_path: Path) -> None:
    crm.execute("CREATE TABLE t (a)")
    for number in range(database.KEPT + 2):
        crm.execute("INSERT INTO t VALUES (?)", (number,))
        made = database.extract(CRM, "SELECT a FROM t", "x")
    assert len(list((tmp_path / "cache").rglob("*.jsonl.zst"))) == database.KEPT
    assert made.path.is_file()


def test_a_line_learns_from_a_query_and_is_cached_while_its_rows_are_the_same(
    line: Line, crm: sqlite3.Connection, texts: Any
) -> None:
    crm.execute("CREATE TABLE tickets (question TEXT, reply TEXT, customer TEXT)")
    said = [(text, json.dumps({"mood": ("good", "bad")[len(text) % 2]}), None) for text in texts(120)]
    crm.execute("BEGIN")
    crm.executemany("INSERT INTO tickets VALUES (?, ?, ?)", said)
    crm.execute("COMMIT")
    line.data["sources"] = [{
        "name": "tickets", "uri": CRM, "query": "SELECT question, reply, customer FROM tickets", "format": "prompt",
        "columns": {"prompt": "question", "completion": "reply", "session": "customer"},
    }]  # fmt: skip
    code, first = line.prepare()
    assert code == 0, first
    assert first["phases"][0]["records_out"] == 120
    line.data["sources"][0]["query"] = "SELECT question, reply, customer FROM tickets ORDER BY reply, question DESC"
    code, second = line.prepare()
    assert second["manifest"] == first["manifest"]
    assert all(phase["cached"] for phase in second["phases"])
    crm.execute("INSERT INTO tickets VALUES ('a new lamp', '{\"mood\": \"good\"}', 'c')")
    _, third = line.prepare()
    assert not third["phases"][0]["cached"]


def test_a_line_whose_connection_is_missing_or_whose_query_fails_stops_and_says_which(
    line: Line, crm: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    line.data["sources"] = [{"name": "tickets", "uri": CRM, "query": "SELECT q FROM missing"}]
    code, answer = line.prepare()
    assert code == 10
    assert "data.sources[0] (tickets)" in answer["message"]
    assert "no such table: missing" in answer["message"]
    monkeypatch.delenv("REFIT_CONNECTION_CRM")
    code, answer = line.prepare()
    assert code == 10
    assert "REFIT_CONNECTION_CRM is not set" in answer["message"]


def spec(**source: Any) -> dict[str, Any]:
    data = {"sources": [{"name": "a", **source}]}
    return {"name": "x", "title": "X", "team": "t", "owner": "o", "data": data, "train": {"base": "file:///b"}}


def test_a_query_and_a_connection_need_each_other(tmp_path: Path) -> None:
    validate(spec(uri=CRM, query="SELECT 1"), "x")
    for wrong, why in [
        ({"uri": CRM}, "there is no query"),
        ({"uri": CRM, "query": " "}, "there is no query"),
        ({"uri": "file:///x", "query": "SELECT 1"}, "a query's uri is sql://NAME"),
        ({"uri": "sql://CRM/x", "query": "SELECT 1"}, "should match pattern"),
    ]:
        with pytest.raises(BadSpec, match=why):
            validate(spec(**wrong), "x")


def test_a_password_in_the_spec_is_refused_and_not_repeated() -> None:
    with pytest.raises(BadSpec, match=r"postgresql://me:\*\*\*@host/db") as caught:
        validate(spec(uri="postgresql://me:s3cr3t@host/db", query="SELECT 1"), "x")
    assert "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (None, "is not set"),
        ("mysql://u:s3cr3t@h/d", "no URL of postgresql or sqlite"),
        ("s3cr3t", "no URL of postgresql or sqlite"),
        ("postgresql://u:s3cr3t@[h/d", "no URL of postgresql or sqlite"),
    ],
)
def test_the_door_looks_at_the_connection_and_asks_nothing(
    given: str | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REFIT_CONNECTION_CRM", raising=False)
    if given:
        monkeypatch.setenv("REFIT_CONNECTION_CRM", given)
    (fault, *_) = check_sources(validate(spec(uri=CRM, query="SELECT 1"), "x"), "x")
    assert "data.sources[0].uri is 'sql://crm'" in fault
    assert why in fault
    assert "s3cr3t" not in fault


def test_a_url_that_the_driver_cannot_use_is_told_without_its_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REFIT_CACHE", str(tmp_path))
    for url in (
        "postgresql://u:s3cr3t@h:port/d",
        "postgresql://u:s3cr3t@127.0.0.1:1/d?nonsense=1",
        "sqlite:////nowhere/s3cr3t",
    ):
        monkeypatch.setenv("REFIT_CONNECTION_CRM", url)
        with pytest.raises((BadInput, ServerUnavailable)) as caught:
            database.extract(CRM, "SELECT 1", "data.sources[0] (a)", pause=0)
        assert "data.sources[0] (a)" in str(caught.value)
        assert "s3cr3t" not in str(caught.value)


def test_the_form_cannot_ask_a_database_anything_else() -> None:
    sources = overrides_schema()["properties"]["data"]["properties"]["sources"]["items"]
    assert "query" not in sources["properties"]
    assert sources["additionalProperties"] is False
    assert load(Path(__file__).parents[2] / "dags/pipelines/tiny.yaml").data.sources[0].query is None
