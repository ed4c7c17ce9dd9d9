"""The stack's own programs, and supervisor's configuration of them: pure, nothing is started or written here.

All programs are in the configuration, none starts by itself: `stack.py` starts them in order, as what they need becomes
ready. Once started, supervisor restarts them for ever. vLLM servers are not here: the controller adds and removes them
at run time as files in `supervisor/conf.d/`, which the configuration includes: they survive supervisor's restart.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from refit.errors import BadInput
from standalone import airflow_config
from standalone.environment import database_url
from standalone.home import Home, root
from standalone.ports import HOST, Ports
from standalone.postgres import server_argv


@dataclass(frozen=True, slots=True)
class Program:
    """One process that supervisor keeps alive."""

    name: str
    argv: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    stop_signal: str = "TERM"
    stop_seconds: int = 15


GROUPS = {
    "postgres": ("postgres",),
    "mlflow": ("mlflow",),
    "airflow": ("airflow-api-server", "airflow-scheduler", "airflow-dag-processor", "airflow-triggerer"),
    "gateway": ("gateway",),
    "controller": ("controller",),
    "recorder": ("recorder",),
}
"""What `refit up --only` accepts → its programs, in the order in which they start."""

LISTENS = {
    "postgres": {"postgres": "PostgreSQL"},
    "mlflow": {"mlflow": "MLflow"},
    "airflow-api-server": {"airflow": "Airflow"},
    "gateway": {"gateway": "the gateway", "gateway_admin": "the gateway's admin page"},
    "controller": {"controller": "the rollout controller"},
    "recorder": {"recorder": "the recorder"},
}
"""Program → the fields of `Ports` it listens on, with what it is in words."""

NEEDS = {"airflow": ("postgres",), "mlflow": ("postgres",), "controller": ("postgres",), "recorder": ("postgres",)}


def select(only: str | None) -> list[str]:
    """The groups to start: those named (with commas) and what they need, or all.

    Raises:
        BadInput: there is no such group.
    """
    if only is None:
        return list(GROUPS)
    wanted = {name.strip() for name in only.split(",") if name.strip()}
    if unknown := sorted(wanted - set(GROUPS)):
        raise BadInput(f"--only: there is no {', '.join(unknown)}; the programs are {', '.join(GROUPS)}.")
    wanted.update(need for name in tuple(wanted) for need in NEEDS.get(name, ()))
    return [name for name in GROUPS if name in wanted]


def programs(home: Home, ports: Ports) -> list[Program]:
    """Every program of the stack, in the order of `GROUPS`."""
    venv = root() / ".venv" / "bin"
    airflow = str(venv / "airflow")
    serving = str(venv / "serving")
    envoy = [
        *[str(venv / "envoy"), "-c", str(bootstrap(home)), "--disable-hot-restart", "--log-level", "warning"],
        *["--file-flush-interval-msec", "500"],  # the recorder reads the access log; Envoy would keep it for 10 s
    ]
    # Changed settings must change the section: that is how supervisor knows what to start again.
    settings = {"REFIT_AIRFLOW_SETTINGS": hashlib.sha256(airflow_config.render(home, ports).encode()).hexdigest()[:16]}
    # The log servers of scheduler and triggerer listen on all addresses; logs are read from the folder instead.
    return [
        Program(
            "postgres",
            server_argv(home, ports),
            stop_signal="INT",  # a fast shutdown: clients are let go, the data is flushed
            stop_seconds=30,
        ),
        Program(
            "mlflow",
            _mlflow_argv(home, ports),
            environment={"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},  # seven processes that we have no use for
        ),
        Program("airflow-api-server", [airflow, "api-server"], environment=settings),
        Program("airflow-scheduler", [airflow, "scheduler", "--skip-serve-logs"], environment=settings),
        Program("airflow-dag-processor", [airflow, "dag-processor"], environment=settings),
        Program("airflow-triggerer", [airflow, "triggerer", "--skip-serve-logs"], environment=settings),
        Program("gateway", envoy),
        Program("controller", [serving, "control"]),
        Program("recorder", [serving, "record"]),
    ]


def bootstrap(home: Home) -> Path:
    """Envoy's bootstrap file; `serving gateway-config` writes it."""
    return home.envoy / "bootstrap.yaml"


def gateway_config_argv(home: Home, ports: Ports) -> list[str]:
    """The command that writes the gateway's files where they are missing, and keeps the routes that are there."""
    serving = str(root() / ".venv" / "bin" / "serving")
    where = ["--home", str(home.path), "--port", str(ports.gateway), "--admin-port", str(ports.gateway_admin)]
    return [serving, "gateway-config", *where]


def supervisor_config(home: Home, socket: Path, all_programs: Iterable[Program]) -> str:
    """The text of supervisord.conf."""
    return "\n".join(
        [
            "; Written by `refit up` at each start; changes are lost.",
            "[supervisord]",
            "nodaemon=true",
            f"logfile={_value(home.logs / 'supervisor.log')}",
            "logfile_maxbytes=10MB",
            "logfile_backups=1",
            f"pidfile={_value(home.supervisor / 'supervisord.pid')}",
            f"childlogdir={_value(home.logs)}",
            "minfds=1024",
            *(["user=root"] if os.geteuid() == 0 else []),  # it warns unless root is meant
            "",
            "[unix_http_server]",
            f"file={_value(socket)}",
            "chmod=0700",
            "",
            "[rpcinterface:supervisor]",
            "supervisor.rpcinterface_factory = supervisor.rpcinterface:make_main_rpcinterface",
            "",
            "[supervisorctl]",
            f"serverurl=unix://{_value(socket)}",
            "",
            "[include]",
            "files = conf.d/*.conf",
            "",
            *(line for program in all_programs for line in _section(program, home)),
        ]
    )


def _section(program: Program, home: Home) -> list[str]:
    environment = ",".join(f'{name}="{_value(value)}"' for name, value in program.environment.items())
    return [
        f"[program:{program.name}]",
        f"command={_value(shlex.join(program.argv))}",
        f"directory={_value(home.path)}",
        *([f"environment={environment}"] if environment else []),
        "autostart=false",
        "autorestart=true",
        *(["priority=1"] if program.name == "postgres" else []),  # stopped last
        # Patience: a start that fails at once is tried again after 1, 2, 3 … seconds, for ever and not three times.
        "startsecs=1",
        "startretries=1000000",
        f"stopsignal={program.stop_signal}",
        f"stopwaitsecs={program.stop_seconds}",
        "killasgroup=true",
        "redirect_stderr=true",
        f"stdout_logfile={_value(_value(log_file(home, program.name)))}",  # this one it expands twice
        "stdout_logfile_maxbytes=20MB",
        "stdout_logfile_backups=2",
        "",
    ]


def log_file(home: Home, program: str) -> Path:
    """Where a program's output goes."""
    return home.logs / f"{program}.log"


def _mlflow_argv(home: Home, ports: Ports) -> list[str]:
    artifacts = (home.store / "mlflow").as_uri()
    backend = database_url("mlflow", ports).replace("postgresql://", "postgresql+psycopg2://")
    address = ["--host", HOST, "--port", str(ports.mlflow), "--workers", "1"]
    return [
        *[str(root() / ".venv" / "bin" / "mlflow"), "server", *address],
        *["--backend-store-uri", backend, "--serve-artifacts", "--artifacts-destination", artifacts],
    ]


def _value(value: object) -> str:
    """A value as supervisor reads it: % starts an expansion."""
    return str(value).replace("%", "%%")
