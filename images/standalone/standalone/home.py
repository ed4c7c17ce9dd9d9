"""The folders and secrets under REFIT_HOME: everything the embedded stack keeps on this machine."""

from __future__ import annotations

import base64
import json
import os
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path

from refit import files

PRIVATE_FOLDER = 0o700
PRIVATE_FILE = 0o600

DATABASES = ("airflow", "mlflow", "refit")
"""A database each, owned by a role of the same name."""


def root() -> Path:
    """The checkout that this package is installed from."""
    return Path(__file__).resolve().parents[3]


@dataclass(frozen=True, slots=True)
class Home:
    """Where things are below one REFIT_HOME."""

    path: Path

    @classmethod
    def from_environment(cls) -> Home:
        """REFIT_HOME, or `.refit` in the checkout."""
        given = os.environ.get("REFIT_HOME")
        return cls(Path(given).expanduser().resolve() if given else root() / ".refit")

    @property
    def secrets(self) -> Path:
        """Passwords and tokens: readable by the owner only."""
        return self.path / "secrets"

    @property
    def token(self) -> Path:
        """The bearer token of the controller and the recorder."""
        return self.secrets / "token"

    @property
    def pgpass(self) -> Path:
        """What libpq and asyncpg read instead of a password in a URL."""
        return self.secrets / "pgpass"

    @property
    def airflow_passwords(self) -> Path:
        """The JSON object user → password that Airflow's SimpleAuthManager reads."""
        return self.secrets / "airflow-passwords.json"

    @property
    def postgres(self) -> Path:
        """The database cluster; owned by an unprivileged user when the stack runs as root."""
        return self.path / "postgres"

    @property
    def airflow(self) -> Path:
        """AIRFLOW_HOME."""
        return self.path / "airflow"

    @property
    def store(self) -> Path:
        """The folder behind REFIT_STORE."""
        return self.path / "store"

    @property
    def logs(self) -> Path:
        """One log file a program."""
        return self.path / "logs"

    @property
    def envoy(self) -> Path:
        """The gateway's bootstrap and route files."""
        return self.path / "envoy"

    @property
    def supervisor(self) -> Path:
        """supervisor's configuration; `conf.d/` holds the programs that are added at run time."""
        return self.path / "supervisor"

    @property
    def record(self) -> Path:
        """What the running stack is: its mark, supervisor's identity, its ports. See `record.py`."""
        return self.path / "stack.json"

    def secret(self, name: str) -> str:
        """A secret that `make_secrets` made."""
        return (self.secrets / name).read_text(encoding="utf-8").strip()

    def make_folders(self) -> None:
        """Create what is missing; the home itself is for its owner only, since logs and answers are in it."""
        for folder in (self.path, self.secrets):
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(PRIVATE_FOLDER)
        for folder in (self.airflow, self.store, self.logs, self.envoy, self.supervisor / "conf.d"):
            folder.mkdir(parents=True, exist_ok=True)

    def make_secrets(self) -> dict[str, str]:
        """Generate what is missing, once.

        Returns:
            The passwords a person needs that were new: {"admin": …, "viewer": …} the first time, then {}.
        """
        for name, value in _generated().items():
            _keep(self.secrets / name, value)
        passwords = {database: self.secret(f"postgres-{database}") for database in (*DATABASES, "postgres")}
        lines = [f"127.0.0.1:*:*:{user}:{password}\n" for user, password in passwords.items()]
        _keep(self.pgpass, "".join(lines))
        people = {"admin": secrets.token_urlsafe(12), "viewer": secrets.token_urlsafe(12)}
        return people if _keep(self.airflow_passwords, json.dumps(people)) else {}

    def print_new_passwords(self, people: dict[str, str]) -> None:
        """Show generated passwords to the person who started the stack, the one time they are new."""
        for user, password in people.items():
            print(f"Airflow user {user}: password {password}   (kept in {self.airflow_passwords})", file=sys.stderr)


def _generated() -> dict[str, str]:
    return {
        "token": secrets.token_urlsafe(32),
        "airflow-jwt": secrets.token_urlsafe(48),
        "airflow-session": secrets.token_urlsafe(32),
        "airflow-fernet": base64.urlsafe_b64encode(secrets.token_bytes(32)).decode(),
        **{f"postgres-{role}": secrets.token_urlsafe(18) for role in (*DATABASES, "postgres")},
    }


def _keep(path: Path, text: str) -> bool:
    """Write a secret unless it is there already. True when it was new."""
    if path.exists():
        return False
    files.write(path, text.encode(), mode=PRIVATE_FILE)
    return True
