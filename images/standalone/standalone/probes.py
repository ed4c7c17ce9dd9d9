"""Whether a program really works: a query, a fresh heartbeat, an answer. A process that merely runs is not ready.

Every probe is given the home, the ports and the time at which the process started (seconds since 1970), and returns
None when the program is ready, otherwise why not, in a few words.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import httpx
import psycopg

from standalone.home import Home
from standalone.ports import HOST, Ports

Probe = Callable[[Home, Ports, float], str | None]

FRESH_SECONDS = 60.0
"""A heartbeat older than this is no sign of life, whatever Airflow says of it."""

_TIMEOUT = 5.0


def postgres(home: Home, ports: Ports, since: float) -> str | None:
    """The server answers a query of its superuser (the other databases may not be there yet)."""
    password = home.secret("postgres-postgres")
    try:
        with psycopg.connect(
            host=HOST, port=ports.postgres, user="postgres", password=password, dbname="postgres", connect_timeout=5
        ) as connection:
            connection.execute("SELECT 1")
    except psycopg.Error as error:
        return _first_line(error)
    return None


def mlflow(home: Home, ports: Ports, since: float) -> str | None:
    """The server answers, and can reach its database."""
    address = f"http://{HOST}:{ports.mlflow}"
    return _get(f"{address}/health") or _get(f"{address}/api/2.0/mlflow/experiments/search?max_results=1")


def airflow_api(home: Home, ports: Ports, since: float) -> str | None:
    """The API server answers, and can reach its database."""
    return _airflow_component(ports, "metadatabase", since)


def airflow_scheduler(home: Home, ports: Ports, since: float) -> str | None:
    """The scheduler's heartbeat in the database is fresh."""
    return _airflow_component(ports, "scheduler", since)


def airflow_dag_processor(home: Home, ports: Ports, since: float) -> str | None:
    """The DAG processor's heartbeat in the database is fresh."""
    return _airflow_component(ports, "dag_processor", since)


def airflow_triggerer(home: Home, ports: Ports, since: float) -> str | None:
    """The triggerer's heartbeat in the database is fresh."""
    return _airflow_component(ports, "triggerer", since)


def gateway(home: Home, ports: Ports, since: float) -> str | None:
    """Envoy is live: it has its listeners and clusters."""
    return _get(f"http://{HOST}:{ports.gateway_admin}/ready")


def controller(home: Home, ports: Ports, since: float) -> str | None:
    """The controller answers."""
    return _get(f"http://{HOST}:{ports.controller}/v1/health")


def recorder(home: Home, ports: Ports, since: float) -> str | None:
    """The recorder answers."""
    return _get(f"http://{HOST}:{ports.recorder}/v1/health")


PROBES: dict[str, Probe] = {
    "postgres": postgres,
    "mlflow": mlflow,
    "airflow-api-server": airflow_api,
    "airflow-scheduler": airflow_scheduler,
    "airflow-dag-processor": airflow_dag_processor,
    "airflow-triggerer": airflow_triggerer,
    "gateway": gateway,
    "controller": controller,
    "recorder": recorder,
}
"""Program → its probe."""


def component_problem(health: dict[str, Any], component: str, since: float, now: datetime) -> str | None:
    """Read one component out of Airflow's health document.

    Airflow calls a component healthy while its last heartbeat is young, also when that was the previous process's: only
    a heartbeat after our process started counts.
    """
    state = health.get(component) or {}
    if state.get("status") != "healthy":
        return f"Airflow says {state.get('status') or 'nothing'} of its {component}"
    beats = [value for name, value in state.items() if name.startswith("latest_") and value]
    if component == "metadatabase":
        return None
    beat = datetime.fromisoformat(beats[0]) if beats else None
    if beat is None or beat.timestamp() < since:
        return f"the {component} has no heartbeat yet"
    age = (now - beat).total_seconds()
    return f"the {component}'s last heartbeat is {age:.0f} s old" if age > FRESH_SECONDS else None


def _airflow_component(ports: Ports, component: str, since: float) -> str | None:
    try:
        answer = httpx.get(f"http://{HOST}:{ports.airflow}/api/v2/monitor/health", timeout=_TIMEOUT, trust_env=False)
        answer.raise_for_status()
        return component_problem(answer.json(), component, since, datetime.now(UTC))
    except (httpx.HTTPError, ValueError) as error:
        return _first_line(error)


def _get(url: str) -> str | None:
    try:
        answer = httpx.get(url, timeout=_TIMEOUT, trust_env=False)
    except httpx.HTTPError as error:
        return _first_line(error)
    return None if answer.status_code == 200 else f"{url} answers {answer.status_code}"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
