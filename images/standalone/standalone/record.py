"""What runs, written down: so that any later `refit` finds the stack, or what an accident left of it."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from refit import files
from refit.proc import Identity, alive
from standalone.home import Home
from standalone.ports import Ports


@dataclass(frozen=True, slots=True)
class Record:
    """The stack that was started last."""

    socket: Path
    """supervisor's unix socket: in a short folder of its own, since a socket's path must stay below 108 bytes."""
    ports: Ports
    digest: str
    """Of the environment that its programs inherited: with another one they must be started anew."""
    supervisor: Identity | None = None

    def runs(self) -> bool:
        """True while its supervisord lives."""
        return self.supervisor is not None and alive(self.supervisor)

    def write(self, home: Home) -> None:
        """Keep it."""
        document = {
            "socket": str(self.socket),
            "ports": asdict(self.ports),
            "digest": self.digest,
            "supervisor": self.supervisor.to_json() if self.supervisor else None,
        }
        files.write(home.record, json.dumps(document, indent=1).encode(), mode=0o600)

    @classmethod
    def read(cls, home: Home) -> Record | None:
        """What was written last, or None."""
        try:
            document = json.loads(home.record.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        identity = document["supervisor"]
        return cls(
            socket=Path(document["socket"]),
            ports=Ports(**document["ports"]),
            digest=document["digest"],
            supervisor=Identity.from_json(identity) if identity else None,
        )


def socket_for(previous: Record | None) -> Path:
    """The path for supervisor's socket: the one used before while its folder is ours, else in a new folder."""
    if previous is not None and previous.socket.parent.is_dir():
        return previous.socket
    return Path(tempfile.mkdtemp(prefix="refit-", dir="/tmp")) / "supervisor.sock"


def forget_socket(record: Record) -> None:
    """Remove the socket's folder when the stack is down."""
    if record.socket.parent.name.startswith("refit-"):
        shutil.rmtree(record.socket.parent, ignore_errors=True)
