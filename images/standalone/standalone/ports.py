"""The one home of the embedded stack's ports.

The defaults lie together, away from the usual ones (5432, 8080, 5000, 8000, 9901) and below the range from which the
kernel takes ports for outgoing connections, so that they are free on most machines. `REFIT_PORT_<NAME>` moves one.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

import psutil

from refit.errors import BadInput, PreflightRefused

HOST = "127.0.0.1"
"""Nothing of the embedded stack listens on any other address."""


@dataclass(frozen=True, slots=True)
class Ports:
    """A TCP port for each server of the stack."""

    postgres: int = 24101
    airflow: int = 24102
    mlflow: int = 24103
    gateway: int = 24104
    gateway_admin: int = 24105
    controller: int = 24106
    recorder: int = 24107
    servers: int = 24120
    """The first port for vLLM servers; the controller takes the next free ones from here on."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Ports:
        """The defaults, moved by `REFIT_PORT_<NAME>`.

        Raises:
            BadInput: a value is no port, or two servers would share one.
        """
        chosen: dict[str, int] = {}
        for field in fields(cls):
            given = environment.get(variable(field.name))
            chosen[field.name] = field.default if given is None else _port(variable(field.name), given)  # type: ignore[assignment]
        owners: dict[int, str] = {}
        for name, port in chosen.items():
            if port in owners:
                raise BadInput(f"{variable(name)} and {variable(owners[port])} are both {port}; each needs its own.")
            owners[port] = name
        return cls(**chosen)

    def variables(self) -> dict[str, str]:
        """The environment that `from_environment` reads back."""
        return {variable(name): str(port) for name, port in asdict(self).items()}


def variable(name: str) -> str:
    """The environment variable that moves a port."""
    return f"REFIT_PORT_{name.upper()}"


def free_ports() -> Ports:
    """Ports that are free at this moment, for a second stack beside the first (tests).

    They are taken from below the kernel's range for outgoing connections: a port of that range could be lent to any
    client between now and the start of the server.
    """
    names = [field.name for field in fields(Ports)]
    start = 20000 + os.getpid() % 500 * 8
    chosen: list[int] = []
    for port in range(start, 32000):
        if is_free(port):
            chosen.append(port)
        if len(chosen) == len(names):
            return Ports(**dict(zip(names, chosen, strict=True)))
    raise PreflightRefused(f"fewer than {len(names)} free ports between {start} and 32000 on {HOST}.")


def is_free(port: int) -> bool:
    """True when a server could listen on the port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: TIME_WAIT is no hindrance
        try:
            probe.bind((HOST, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def refuse_taken(ports: Ports, names: Mapping[str, str]) -> None:
    """Refuse to start on ports that somebody else has.

    Args:
        ports: the stack's ports.
        names: field of `Ports` → the server that wants it, in words.

    Raises:
        PreflightRefused: one line for each taken port: the port, who has it, which variable moves ours.
    """
    lines = []
    for name, server in names.items():
        port = getattr(ports, name)
        if not is_free(port):
            advice = f"stop that, or set {variable(name)} to a free port."
            lines.append(f"port {port} for {server} is in use by {owner(port)}; {advice}")
    if lines:
        raise PreflightRefused("\n".join(lines))


def owner(port: int) -> str:
    """Who listens on a port, in words; the kernel tells only root about other users' processes."""
    try:
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr
            if listens and listens.port == port and connection.pid:
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except psutil.Error:
        return "another program"
    return "another program"


def _port(name: str, text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise BadInput(f"{name} is {text!r}; expected a port number from 1 to 65535.")
    return int(text)
