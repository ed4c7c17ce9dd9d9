"""What `docker-compose.yaml` needs around its services: the folders, secrets and files of the embedded stack.

`python -m standalone.compose STEP`, where STEP is

- `prepare`: secrets, Airflow's configuration, the engines' supervisor configuration;
- `migrate`: roles and databases, Refit's tables (PostgreSQL must be up);
- `probe NAME`: healthy or not, by the probe that `refit up` waits for.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from refit import files
from standalone import airflow_config, postgres
from standalone.environment import database_url
from standalone.home import Home
from standalone.migrate import migrate
from standalone.ports import Ports
from standalone.probes import PROBES
from standalone.programs import supervisor_config


def engines_socket(home: Home) -> Path:
    """The socket of the supervisor that holds the vLLM servers: in a volume that the controller shares."""
    return home.supervisor / "engines.sock"


def prepare(home: Home, ports: Ports) -> None:
    """Write what is missing; passwords that are new are printed once."""
    home.make_folders()
    home.print_new_passwords(home.make_secrets())
    files.write(home.airflow / "airflow.cfg", airflow_config.render(home, ports).encode(), mode=0o600)
    engines = supervisor_config(home, engines_socket(home), [])
    files.write(home.supervisor / "engines.conf", engines.encode(), mode=0o600)


def make_databases(home: Home, ports: Ports) -> None:
    """Roles, databases and Refit's tables, as far as they are missing."""
    postgres.make_databases(home, ports)
    for name in migrate(database_url("refit", ports), passfile=home.pgpass):
        print(f"applied {name}", file=sys.stderr)


def main() -> int:
    """Returns 0, or 1 for a program that is not ready."""
    parser = argparse.ArgumentParser(prog="python -m standalone.compose")
    parser.add_argument("step", choices=["prepare", "migrate", "probe"])
    parser.add_argument("name", nargs="?", choices=sorted(PROBES))
    arguments = parser.parse_args()
    home, ports = Home.from_environment(), Ports.from_environment()
    if arguments.step == "prepare":
        prepare(home, ports)
    elif arguments.step == "migrate":
        make_databases(home, ports)
    elif problem := PROBES[arguments.name](home, ports, 0.0):
        print(problem, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
