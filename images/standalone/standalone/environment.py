"""The environment variables by which the services find each other; see images/README.md for the list.

They are built here for the embedded stack. A compose file or a pod sets the same names by other means, so a program
reads them and cannot tell where it runs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from refit.proc import STACK_TAG
from standalone.home import Home, root
from standalone.ports import HOST, Ports

_GIVEN = ("REFIT_CACHE", "REFIT_CACHE_GIB", "REFIT_STORE", "REFIT_PIPELINES", "REFIT_SQL", "REFIT_BACKEND",
          "REFIT_COMPUTE_PYTHON")  # fmt: skip
"""What a person (or a test) may point elsewhere; everything else follows from the home and the ports."""

_OTHER_WORK = ("AIRFLOW", "PG", "MLFLOW_", "SUPERVISOR_")
"""Settings of another Airflow, PostgreSQL or MLflow on this machine, which must not leak into ours."""


def variables(home: Home, ports: Ports, socket: Path, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What every program of the stack, and a command outside of it, needs to find the others."""
    venv = root() / ".venv"
    found = {
        "REFIT_HOME": str(home.path),
        "REFIT_CACHE": str(Path("~/.cache/refit").expanduser()),
        "REFIT_STORE": home.store.as_uri(),
        "REFIT_PIPELINES": str(root() / "dags" / "pipelines"),
        "REFIT_SQL": str(root() / "sql"),
        "REFIT_BACKEND": "local",
        "REFIT_DATABASE_URL": database_url("refit", ports),
        "PGPASSFILE": str(home.pgpass),
        "REFIT_AIRFLOW_URL": _http(ports.airflow),
        "MLFLOW_TRACKING_URI": _http(ports.mlflow),
        "REFIT_GATEWAY_URL": _http(ports.gateway),
        "REFIT_GATEWAY_ADMIN_URL": _http(ports.gateway_admin),
        "REFIT_CONTROLLER_URL": _http(ports.controller),
        "REFIT_RECORDER_URL": _http(ports.recorder),
        "REFIT_TOKEN_FILE": str(home.token),
        "REFIT_COMPUTE_PYTHON": str(root() / ".venv-compute" / "bin" / "python"),
        "REFIT_SUPERVISOR_SOCKET": str(socket),
        "AIRFLOW_HOME": str(home.airflow),
        # nobody's business but ours, and no waiting for an answer from a network that may not be there
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "GX_ANALYTICS_ENABLED": "false",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "PATH": os.pathsep.join([str(venv / "bin"), environment.get("PATH", os.defpath)]),
        **ports.variables(),
    }
    found.update({name: environment[name] for name in _GIVEN if environment.get(name)})
    return found


def for_programs(home: Home, ours: Mapping[str, str], environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The whole environment of a program: the caller's, less what is of other work, plus ours and the stack's mark."""
    inherited = {name: value for name, value in environment.items() if not name.startswith(_OTHER_WORK)}
    for proxy in ("no_proxy", "NO_PROXY"):
        inherited[proxy] = ",".join(filter(None, [inherited.get(proxy), HOST, "localhost"]))
    return {**inherited, **ours, STACK_TAG: str(home.path), "PYTHONUNBUFFERED": "1"}


def database_url(database: str, ports: Ports) -> str:
    """A database's URL. The password is not in it: PGPASSFILE names the file that holds it."""
    return f"postgresql://{database}@{HOST}:{ports.postgres}/{database}"


def _http(port: int) -> str:
    return f"http://{HOST}:{port}"
