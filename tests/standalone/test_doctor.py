"""`refit doctor` and `refit status` where no stack runs: what they find, and how they say it."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

import pytest

from refit.proc import STACK_TAG, Identity, kill_tree, spawn
from standalone import doctor
from standalone.cli import main
from standalone.home import Home
from standalone.ports import HOST, free_ports
from standalone.status import status, table


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home")
    home.make_folders()
    home.make_secrets()
    return home


def test_a_sound_home_has_no_problem_of_its_own(home: Home) -> None:
    found = doctor.examine(home, free_ports())["problems"]
    assert not {"secrets", "stack", "python", "tools"} & set(found)


def test_a_secret_that_others_can_read_is_named_with_the_remedy(home: Home) -> None:
    home.token.chmod(0o644)
    (line,) = doctor.examine(home, free_ports())["problems"]["secrets"]
    assert line == f"{home.token} has mode 0644; run: chmod 600 {home.token}"


def test_a_taken_port_is_named_with_its_variable(home: Home) -> None:
    ports = free_ports()
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((HOST, ports.mlflow))
        taken.listen(1)
        (line,) = doctor.examine(home, ports)["problems"]["stack"]
    assert f"port {ports.mlflow} for MLflow is in use" in line
    assert "REFIT_PORT_MLFLOW" in line


def test_what_an_accident_left_is_named_by_its_pid(home: Home) -> None:
    left = spawn(["sleep", "600"], env={**os.environ, STACK_TAG: str(home.path)})
    try:
        (line,) = doctor.examine(home, free_ports())["problems"]["stack"]
        assert line == f"supervisor is gone and left pid {left.pid}; `make up` or `make down` cleans that."
    finally:
        kill_tree(Identity.of(left.pid), grace=1)
        left.wait()


def test_no_stack_is_a_plain_answer(home: Home) -> None:
    document = status(home)
    assert document["running"] is False
    assert table(document) == [f"no stack runs in {home.path}; `make up` starts it."]


def test_down_finds_what_runs_of_a_home_that_was_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    left = spawn(["sleep", "600"], env={**os.environ, STACK_TAG: str(gone)})
    while str(gone) not in Path(f"/proc/{left.pid}/environ").read_text():  # a moment after it was started
        time.sleep(0.01)
    monkeypatch.setenv("REFIT_HOME", str(gone))
    monkeypatch.setattr("sys.argv", ["refit", "down", "--grace", "1"])
    assert main() == 0
    assert json.loads(capsys.readouterr().out) == {"running": False, "ended": [left.pid]}
    assert left.wait() != 0
