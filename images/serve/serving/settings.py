"""Where the serving programs find each other: the environment, read once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from refit.errors import BadInput

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Settings:
    """Folders, addresses and the token of one stack."""

    home: Path
    gateway: str
    admin: str
    controller: str
    recorder: str
    database: str | None
    token_file: Path | None
    supervisor_socket: Path | None
    compute_python: str
    first_server_port: int
    alert_webhook: str | None

    @classmethod
    def from_environment(cls, env: Mapping[str, str] = os.environ) -> Settings:
        """Read the variables of `images/README.md`; the defaults are the embedded stack's."""
        home = Path(env.get("REFIT_HOME") or ".refit").absolute()
        token, socket = env.get("REFIT_TOKEN_FILE"), env.get("REFIT_SUPERVISOR_SOCKET")
        return cls(
            home=home,
            gateway=env.get("REFIT_GATEWAY_URL", f"http://{HOST}:24104"),
            admin=env.get("REFIT_GATEWAY_ADMIN_URL", f"http://{HOST}:24105"),
            controller=env.get("REFIT_CONTROLLER_URL", f"http://{HOST}:24106"),
            recorder=env.get("REFIT_RECORDER_URL", f"http://{HOST}:24107"),
            database=env.get("REFIT_DATABASE_URL"),
            token_file=Path(token) if token else home / "secrets" / "token",
            supervisor_socket=Path(socket) if socket else None,
            compute_python=env.get("REFIT_COMPUTE_PYTHON", "python3"),
            first_server_port=int(env.get("REFIT_PORT_SERVERS", "24120")),
            alert_webhook=env.get("REFIT_ALERT_WEBHOOK"),
        )

    @property
    def envoy(self) -> Path:
        """Envoy's bootstrap, the route table and what is rendered from it."""
        return self.home / "envoy"

    @property
    def rollouts(self) -> Path:
        """A folder a rollout, with its journal."""
        return self.home / "rollouts"

    @property
    def servers(self) -> Path:
        """A record a model server."""
        return self.home / "servers"

    @property
    def spool(self) -> Path:
        """What waits for Postgres: the gateway's access log, answers of shadow requests, feedback."""
        return self.home / "spool"

    @property
    def logs(self) -> Path:
        """One log file a program."""
        return self.home / "logs"

    def token(self) -> str:
        """The bearer token of the controller and the recorder.

        Raises:
            BadInput: there is none; without it nobody could be let in.
        """
        try:
            token = self.token_file.read_text(encoding="utf-8").strip() if self.token_file else ""
        except OSError as error:
            raise BadInput(
                f"{self.token_file}: the token cannot be read: {error}. Start the stack with `refit up`."
            ) from error
        if not token:
            raise BadInput(f"{self.token_file}: the token is empty. Remove the file and run `refit up` to make one.")
        return token


def port_of(url: str) -> int:
    """The port of a URL that has one."""
    port = urlsplit(url).port
    if port is None:
        raise BadInput(f"{url}: expected an address with a port, as in http://127.0.0.1:24106.")
    return port
