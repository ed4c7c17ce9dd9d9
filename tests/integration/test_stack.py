"""The embedded stack for real: up, twice, after accidents, and down with nothing left."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import psycopg
import pytest

from refit.proc import STACK_TAG, Identity, alive, find_tagged, spawn
from standalone.environment import database_url
from standalone.home import Home
from standalone.ports import HOST, free_ports
from standalone.record import Record
from standalone.supervisor import Supervisor

pytestmark = pytest.mark.integration

REFIT = Path(__file__).resolve().parents[2] / ".venv" / "bin" / "refit"
GROUPS = "postgres,mlflow,airflow"


class Stack:
    """One home with its own ports, driven by the command line as a person would."""

    def __init__(self, folder: Path) -> None:
        self.home = Home(folder / "home")
        self.ports = free_ports()
        self.environment = {**os.environ, **self.ports.variables(), "REFIT_HOME": str(self.home.path)}

    def refit(self, *arguments: str) -> dict[str, Any]:
        done = subprocess.run([REFIT, *arguments], env=self.environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer

    def pids(self) -> dict[str, int]:
        programs = self.refit("status")["programs"]
        return {name: program["pid"] for name, program in programs.items() if program["pid"]}

    def record(self) -> Record:
        record = Record.read(self.home)
        assert record is not None
        return record

    def members(self) -> list[psutil.Process]:
        """Everything in supervisor's session, and PostgreSQL's children, which leave it."""
        supervisor = self.record().supervisor
        assert supervisor is not None
        process = psutil.Process(supervisor.pid)
        return [process, *process.children(recursive=True)]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("stack"))
    try:
        stack.refit("up", "--only", GROUPS, "--wait", "600")
        yield stack
    finally:
        stack.refit("down", "--grace", "2")


def until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.3)
    return condition()


def test_every_program_works_and_not_only_runs(stack: Stack) -> None:
    programs = stack.refit("status")["programs"]
    ready = {name for name, program in programs.items() if program["ready"]}
    airflow = {"airflow-api-server", "airflow-scheduler", "airflow-dag-processor", "airflow-triggerer"}
    assert ready == {"postgres", "mlflow", *airflow}


def test_each_database_belongs_to_a_role_with_a_password(stack: Stack) -> None:
    url = database_url("refit", stack.ports)
    with psycopg.connect(url, passfile=str(stack.home.pgpass)) as connection:
        assert connection.execute("SELECT current_user, current_database()").fetchone() == ("refit", "refit")
        assert connection.execute("SELECT count(*) > 0 FROM schema_migrations").fetchone() == (True,)
    with pytest.raises(psycopg.OperationalError, match="password"):
        psycopg.connect(url, passfile="/dev/null")


def test_both_airflow_users_log_in_and_a_wrong_password_does_not(stack: Stack) -> None:
    address = f"http://{HOST}:{stack.ports.airflow}/auth/token"
    passwords = json.loads(stack.home.airflow_passwords.read_text())
    for user, password in passwords.items():
        assert httpx.post(address, json={"username": user, "password": password}).status_code == 201
    assert httpx.post(address, json={"username": "admin", "password": "guess"}).status_code == 401


def test_mlflow_keeps_an_experiment(stack: Stack) -> None:
    api = f"http://{HOST}:{stack.ports.mlflow}/api/2.0/mlflow/experiments"
    made = httpx.post(f"{api}/create", json={"name": "tested"}).json()["experiment_id"]
    found = httpx.get(f"{api}/get-by-name", params={"experiment_name": "tested"}).json()["experiment"]
    assert found["experiment_id"] == made
    assert found["artifact_location"].startswith("mlflow-artifacts:")


def test_nothing_listens_beyond_this_machine(stack: Stack) -> None:
    listening = {
        connection.laddr.ip
        for process in stack.members()
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {HOST}


def test_no_password_is_on_a_command_line_or_in_an_environment(stack: Stack) -> None:
    secrets = {path.name: path.read_text().strip() for path in stack.home.secrets.iterdir()}
    for process in stack.members():
        seen = " ".join([*process.cmdline(), *process.environ().values()])
        assert not [name for name, secret in secrets.items() if secret in seen], process


@pytest.mark.skipif(os.geteuid() != 0, reason="only root must drop its rights")
def test_postgres_does_not_run_as_root_and_no_folder_above_was_opened(stack: Stack) -> None:
    server = psutil.Process(stack.pids()["postgres"])
    assert server.username() in ("postgres", "nobody")
    assert stat.S_IMODE(stack.home.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(stack.home.path.parent.stat().st_mode) == 0o700


def test_a_second_up_changes_nothing(stack: Stack) -> None:
    before = stack.pids()
    stack.refit("up", "--only", GROUPS)
    assert stack.pids() == before


def test_a_killed_postgres_comes_back_and_the_stack_with_it(stack: Stack) -> None:
    before = stack.pids()["postgres"]
    os.kill(before, signal.SIGKILL)
    assert until(lambda: stack.refit("status")["ready"] and stack.pids()["postgres"] != before, 400)


def test_a_server_added_at_run_time_survives_the_death_of_supervisor_and_so_does_a_job(stack: Stack) -> None:
    """A controller adds vLLM servers while the stack runs; a training job must outlive an accident of the stack."""
    added = stack.home.supervisor / "conf.d" / "server-a.conf"
    added.write_text("[program:server-a]\ncommand=sleep 100000\nautorestart=true\n")
    with Supervisor(stack.record().socket) as supervisor:
        assert supervisor.update() == []
        assert until(lambda: "server-a" in supervisor.running(), 10)
    job = spawn(["sleep", "100000"], env={**os.environ, STACK_TAG: str(stack.home.path)}, tag="a job")
    job_identity = Identity.of(job.pid)
    old = [Identity.of(process.pid) for process in stack.members()]
    supervisor_identity = stack.record().supervisor
    assert supervisor_identity is not None
    os.kill(supervisor_identity.pid, signal.SIGKILL)
    assert until(lambda: not alive(supervisor_identity), 10)

    after = stack.refit("up", "--only", GROUPS, "--wait", "600")

    assert after["ready"]
    assert [identity for identity in old if alive(identity)] == []
    assert after["programs"]["server-a"]["state"] == "running"
    assert alive(job_identity)
    stack.refit("down", "--grace", "2")
    assert not alive(job_identity)
    assert job.wait() == -signal.SIGTERM


def test_down_leaves_nothing_and_can_be_repeated(stack: Stack) -> None:
    stack.refit("down")
    assert find_tagged(str(stack.home.path), variable=STACK_TAG) == []
    assert stack.refit("status")["running"] is False
    assert stack.refit("down")["ended"] == []


def test_a_taken_port_is_one_line_that_names_port_owner_and_variable(tmp_path: Path) -> None:
    stack = Stack(tmp_path)
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((HOST, stack.ports.postgres))
        taken.listen(1)
        done = subprocess.run(
            [REFIT, "up", "--only", "postgres"], env=stack.environment, capture_output=True, text=True
        )
    assert done.returncode == 11
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("refit: ")]
    assert f"port {stack.ports.postgres} for PostgreSQL is in use by" in line
    assert f"(pid {os.getpid()})" in line
    assert "REFIT_PORT_POSTGRES" in line
    assert json.loads(done.stdout)["exit_code"] == 11
    assert find_tagged(str(stack.home.path), variable=STACK_TAG) == []
    folder = stack.record().socket.parent
    assert folder.is_dir()
    stack.refit("down")
    assert not folder.exists(), "a refused start leaves nothing in /tmp that down would not find"


@pytest.mark.parametrize(("variable", "what"), [("REFIT_MIN_MEMORY_GB", "memory"), ("REFIT_MIN_DISK_GB", "disk")])
def test_too_little_room_is_one_line_before_anything_starts(tmp_path: Path, variable: str, what: str) -> None:
    stack = Stack(tmp_path)
    environment = {**stack.environment, variable: "1000000"}
    done = subprocess.run([REFIT, "up", "--only", "postgres"], env=environment, capture_output=True, text=True)
    assert done.returncode == 11
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("refit: ")]
    assert f"GB of {what} are free" in line
    assert not stack.home.postgres.exists()
    stack.refit("down")


def test_an_interrupted_up_is_finished_by_the_next(tmp_path: Path) -> None:
    stack = Stack(tmp_path)
    try:
        first = subprocess.Popen([REFIT, "up", "--only", "postgres"], env=stack.environment, stderr=subprocess.PIPE)
        assert until(lambda: (record := Record.read(stack.home)) is not None and record.runs(), 60)
        first.send_signal(signal.SIGINT)
        first.communicate()
        assert stack.refit("up", "--only", "postgres")["programs"]["postgres"]["ready"]
    finally:
        stack.refit("down")
    assert find_tagged(str(stack.home.path), variable=STACK_TAG) == []
