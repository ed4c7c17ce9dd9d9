"""Alerts reach a person without anybody waiting for them; the command line says all it can do."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from serving.alerts import Alerts
from serving.cli import main
from serving.database import Database


class Hook:
    """A webhook that takes what comes, after refusing it as often as it is told to."""

    def __init__(self) -> None:
        self.taken: list[dict[str, Any]] = []
        self.refusals = 0
        double = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                if double.refusals:
                    double.refusals -= 1
                    self.send_response(500)
                else:
                    double.taken.append(body)
                    self.send_response(204)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook"


@pytest.fixture
def hook() -> Iterator[Hook]:
    made = Hook()
    yield made
    made.server.shutdown()
    made.server.server_close()


NO_DATABASE = Database(None, "test")


def test_only_what_is_dangerous_is_said_and_until_it_was_taken(hook: Hook) -> None:
    alerts = Alerts(NO_DATABASE, hook.url)
    alerts.suspicious("servers", "a server was started again")
    alerts.dangerous("controller", "taken back", pipeline="tiny", details={"step": 1})
    assert hook.taken == [], "raising an alert waits for nobody"
    hook.refusals = 2
    for _ in range(4):
        alerts.deliver()
    assert [(said["level"], said["text"], said["pipeline"], said["details"]) for said in hook.taken] == [
        ("dangerous", "taken back", "tiny", {"step": 1})
    ]


def test_the_same_alert_is_one_alert(hook: Hook) -> None:
    alerts = Alerts(NO_DATABASE, hook.url)
    for _ in range(3):
        alerts.dangerous("controller", "taken back", key="back-r")
    alerts.deliver()
    assert len(hook.taken) == 1


def test_a_webhook_that_is_not_there_is_given_up_in_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.alerts.WEBHOOK_TRIES", 3)
    alerts = Alerts(NO_DATABASE, "http://127.0.0.1:9/nobody")
    alerts.dangerous("controller", "taken back")
    for _ in range(6):
        alerts.deliver()
    assert capsys.readouterr().err.count("level=undelivered") == 1


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    for command in ("control", "record", "gateway-config", "split", "status", "rollback", "replay"):
        assert f"    {command}" in text


def test_the_gateways_files_are_written_and_what_is_there_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["gateway-config", "--home", str(tmp_path), "--port", "9001", "--admin-port", "9002"]
    assert main(arguments) == 0
    answer = json.loads(capsys.readouterr().out)
    bootstrap = Path(answer["bootstrap"])
    assert json.loads(bootstrap.read_text())["admin"]["address"]["socket_address"]["port_value"] == 9002
    before = (tmp_path / "envoy" / "routes" / "rds.json").stat().st_mtime_ns
    assert main(arguments) == 0
    assert (tmp_path / "envoy" / "routes" / "rds.json").stat().st_mtime_ns == before


def test_a_controller_without_a_token_lets_nobody_in_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REFIT_HOME", str(tmp_path))
    monkeypatch.delenv("REFIT_TOKEN_FILE", raising=False)
    assert main(["control"]) == 10
    assert "the token cannot be read" in capsys.readouterr().err


def test_a_controller_that_does_not_answer_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "token").write_text("t")
    monkeypatch.setenv("REFIT_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("REFIT_CONTROLLER_URL", "http://127.0.0.1:9")
    assert main(["status"]) == 30
    assert len(capsys.readouterr().err.splitlines()) == 1
