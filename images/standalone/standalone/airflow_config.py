"""Airflow's configuration for the embedded stack, as one file that only its owner can read.

A file and not AIRFLOW__ variables: variables are inherited by every job, and a job must hold no password.
"""

from __future__ import annotations

import configparser
import importlib.metadata
import io
import os

from standalone.environment import database_url
from standalone.home import Home, root
from standalone.ports import HOST, Ports

USERS = {"admin": "admin", "viewer": "viewer"}
"""Airflow user → role."""


def settings(home: Home, ports: Ports) -> dict[str, dict[str, str]]:
    """Section → option → value; only what differs from Airflow's defaults."""
    url = database_url("airflow", ports)
    address = f"http://{HOST}:{ports.airflow}"
    return {
        "core": {
            "executor": "LocalExecutor",
            # Waiting is deferred, so few slots are needed; each costs a process of 150 MB.
            "parallelism": str(max(4, os.cpu_count() or 1)),
            "dags_folder": str(root() / "dags"),
            "plugins_folder": str(root() / "plugins"),
            "load_examples": "False",
            "fernet_key": home.secret("airflow-fernet"),
            "simple_auth_manager_users": ",".join(f"{user}:{role}" for user, role in USERS.items()),
            "simple_auth_manager_passwords_file": str(home.airflow_passwords),
            "execution_api_server_url": f"{address}/execution/",
            "min_serialized_dag_update_interval": "10",
            "dagbag_import_timeout": "180",  # the default of 30 s fails tasks on a loaded machine
        },
        "database": {
            "sql_alchemy_conn": url.replace("postgresql://", "postgresql+psycopg2://"),
            "sql_alchemy_conn_async": url.replace("postgresql://", "postgresql+asyncpg://"),
            "max_db_retries": "10",  # PostgreSQL may be restarted under a running stack
        },
        "api": {
            "host": HOST,
            "port": str(ports.airflow),
            "base_url": address,
            "workers": "1",
            "secret_key": home.secret("airflow-session"),
            "instance_name": "Refit",
        },
        "api_auth": {"jwt_secret": home.secret("airflow-jwt")},
        "scheduler": {
            "scheduler_idle_sleep_time": "0.2",  # 0.35 s between two trivial tasks instead of more than a second
            # A death is noticed within a minute; the defaults of 300 s leave a run waiting for five.
            "task_instance_heartbeat_timeout": "60",
            "orphaned_tasks_check_interval": "30",
            "scheduler_health_check_threshold": "45",
        },
        "triggerer": {"triggerer_health_check_threshold": "45", "capacity": "200"},
        "dag_processor": {
            "parsing_processes": "1",
            "refresh_interval": "15",
            "dag_file_processor_timeout": "180",  # a loaded machine imports the Kubernetes provider slowly
            "health_check_threshold": "60",
        },
        "workers": {
            "execution_api_timeout": "60",  # the default of 5 s fails tasks on a loaded machine
            "execution_api_retries": "8",
            "max_failed_heartbeats": "20",  # the API server may be restarted under a running task
        },
        "logging": {"base_log_folder": str(home.airflow / "logs"), "colored_console_log": "False"},
    }


def version() -> str:
    """The version of the installed Airflow: its tables belong to it."""
    return importlib.metadata.version("apache-airflow-core")


def render(home: Home, ports: Ports) -> str:
    """The text of airflow.cfg."""
    parser = configparser.ConfigParser(interpolation=None)
    for section, options in settings(home, ports).items():
        parser[section] = {name: value.replace("%", "%%") for name, value in options.items()}
    buffer = io.StringIO()
    parser.write(buffer)
    return "# Written by `refit up` at each start; changes are lost.\n" + buffer.getvalue()
