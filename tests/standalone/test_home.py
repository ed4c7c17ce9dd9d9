"""Folders and secrets under REFIT_HOME, and what is written there."""

from __future__ import annotations

import configparser
import json
import os
import stat
from pathlib import Path

import pytest

from standalone import airflow_config, environment, stack
from standalone.home import Home
from standalone.ports import Ports
from standalone.record import Record, forget_socket, socket_for


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home")
    home.make_folders()
    home.make_secrets()
    return home


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_secrets_are_for_their_owner_only_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        home = Home(tmp_path / "home")
        home.make_folders()
        home.make_secrets()
    finally:
        os.umask(before)
    assert mode(home.path) == mode(home.secrets) == 0o700
    assert {path.name: mode(path) for path in home.secrets.iterdir() if mode(path) != 0o600} == {}


def test_secrets_are_made_once_and_told_once(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.make_folders()
    told = home.make_secrets()
    kept = {path.name: path.read_text() for path in home.secrets.iterdir()}
    assert told == json.loads(home.airflow_passwords.read_text())
    assert set(told) == {"admin", "viewer"}
    assert home.make_secrets() == {}
    assert {path.name: path.read_text() for path in home.secrets.iterdir()} == kept


def test_two_homes_share_no_secret(home: Home, tmp_path: Path) -> None:
    other = Home(tmp_path / "other")
    other.make_folders()
    other.make_secrets()
    ours = {path.read_text() for path in home.secrets.iterdir()}
    assert not ours & {path.read_text() for path in other.secrets.iterdir()}


def test_the_password_file_has_a_line_for_each_role_in_the_form_libpq_reads(home: Home) -> None:
    lines = [line.split(":") for line in home.pgpass.read_text().splitlines()]
    assert {line[3]: line[4] for line in lines} == {
        role: home.secret(f"postgres-{role}") for role in ("airflow", "mlflow", "refit", "postgres")
    }
    assert all(line[:3] == ["127.0.0.1", "*", "*"] for line in lines)


def test_no_variable_carries_a_secret(home: Home) -> None:
    values = " ".join(environment.variables(home, Ports(), Path("/tmp/s"), {}).values())
    assert [path.name for path in home.secrets.iterdir() if path.read_text().strip() in values] == []


def test_the_variables_of_the_contract_are_all_there(home: Home) -> None:
    ours = [
        "HOME",
        "CACHE",
        "STORE",
        "PIPELINES",
        "SQL",
        "TOKEN_FILE",
        "COMPUTE_PYTHON",
        "BACKEND",
        "SUPERVISOR_SOCKET",
    ]
    urls = ["DATABASE_URL", "CONTROLLER_URL", "RECORDER_URL", "GATEWAY_URL", "AIRFLOW_URL"]
    names = [*(f"REFIT_{name}" for name in (*ours, *urls)), "MLFLOW_TRACKING_URI", "PGPASSFILE"]
    found = environment.variables(home, Ports(), Path("/tmp/s"), {"REFIT_CACHE": "/elsewhere"})
    assert set(names) <= set(found)
    assert found["REFIT_STORE"] == home.store.as_uri()
    assert found["REFIT_DATABASE_URL"] == "postgresql://refit@127.0.0.1:24101/refit"
    assert found["REFIT_CACHE"] == "/elsewhere"


def test_settings_of_other_work_on_this_machine_do_not_leak_in() -> None:
    foreign = {"AIRFLOW__CORE__EXECUTOR": "CeleryExecutor", "PGHOST": "production", "MLFLOW_TRACKING_URI": "http://x"}
    home = Home(Path("/h"))
    found = environment.for_programs(home, {"REFIT_HOME": "/h"}, {**foreign, "LANG": "C", "no_proxy": "intranet"})
    assert not set(foreign) & set(found)
    assert found["LANG"] == "C"
    assert found["no_proxy"] == "intranet,127.0.0.1,localhost"


def test_airflow_listens_here_only_and_knows_its_own_address(home: Home) -> None:
    ports = Ports(airflow=31000, postgres=31001)
    parser = configparser.ConfigParser()  # with interpolation, as Airflow reads it
    parser.read_string(airflow_config.render(home, ports))
    assert parser["api"]["host"] == "127.0.0.1"
    assert parser["api"]["port"] == "31000"
    assert parser["api"]["base_url"] == "http://127.0.0.1:31000"
    assert parser["core"]["execution_api_server_url"] == "http://127.0.0.1:31000/execution/"
    assert parser["core"]["load_examples"] == "False"
    assert parser["database"]["sql_alchemy_conn"] == "postgresql+psycopg2://airflow@127.0.0.1:31001/airflow"
    assert 30 <= parser.getfloat("scheduler", "task_instance_heartbeat_timeout") <= 60
    assert 30 <= parser.getfloat("scheduler", "orphaned_tasks_check_interval") <= 60


def test_a_record_reads_back_and_keeps_its_socket_in_a_short_path(home: Home) -> None:
    socket = socket_for(None)
    record = Record(socket, Ports(airflow=31000), "digest")
    record.write(home)
    assert Record.read(home) == record
    assert not record.runs()
    assert len(str(socket)) < 100
    assert mode(socket.parent) == 0o700
    assert socket_for(record) == socket
    forget_socket(record)
    renewed = socket_for(record)
    assert renewed != socket
    forget_socket(Record(renewed, Ports(), "digest"))


def test_another_terminal_is_no_reason_to_start_the_stack_anew_and_another_port_is(home: Home) -> None:
    def digest(ports: Ports, path: str) -> str:
        return stack._digest(environment.variables(home, ports, Path("/tmp/s"), {"PATH": path}))

    assert digest(Ports(), "/usr/bin") == digest(Ports(), "/bin:/opt/bin")
    assert digest(Ports(), "/usr/bin") != digest(Ports(mlflow=31000), "/usr/bin")
