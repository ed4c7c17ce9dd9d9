"""supervisord over its unix socket: add a program while it runs, look at it, take it away."""

from __future__ import annotations

import http.client
import shlex
import socket
import xmlrpc.client
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from refit import files
from refit.errors import ServerUnavailable

# Answers of supervisor that mean "it is so already" (supervisor/xmlrpc.py, class Faults).
_BAD_NAME, _NOT_RUNNING, _ALREADY_STARTED, _ALREADY_ADDED = 10, 70, 60, 90
RPC_SECONDS = 60.0


class Supervisor:
    """The supervisord of the embedded stack, as far as model servers go."""

    def __init__(self, path: Path, conf: Path, logs: Path) -> None:
        self._path = path
        self._conf = conf
        self._logs = logs

    def add(self, name: str, argv: Sequence[str], env: Mapping[str, str], *, stop_seconds: int) -> None:
        """Write a program's file and have supervisor take it in and start it; harmless when it is there already.

        The file stays, so the program starts again with the stack.
        """
        pairs = ",".join(f'{key}="{_escape(value)}"' for key, value in env.items())
        lines = [
            f"[program:{name}]",
            f"command={_escape(shlex.join(argv))}",
            f"environment={pairs}",
            "autostart=true",
            "autorestart=true",
            "startsecs=1",
            "startretries=1000000",
            "stopsignal=TERM",
            f"stopwaitsecs={stop_seconds}",
            "stopasgroup=false",
            "killasgroup=true",
            "redirect_stderr=true",
            f"stdout_logfile={_escape(str(self.log(name)))}",
            "stdout_logfile_maxbytes=20MB",
            "stdout_logfile_backups=1",
            "",
        ]
        files.write(self._file(name), "\n".join(lines).encode(), mode=0o600)
        self._call("reloadConfig")
        self._call("addProcessGroup", name, tolerate=(_ALREADY_ADDED,))
        self._call("startProcess", name, False, tolerate=(_ALREADY_STARTED,))

    def remove(self, name: str) -> None:
        """Stop a program and forget it; harmless when it is not there."""
        self._call("stopProcess", name, True, tolerate=(_NOT_RUNNING, _BAD_NAME))
        self._call("removeProcessGroup", name, tolerate=(_BAD_NAME,))
        self._file(name).unlink(missing_ok=True)
        self._call("reloadConfig")

    def restart(self, name: str) -> None:
        """Stop a program and start it again."""
        self._call("stopProcess", name, True, tolerate=(_NOT_RUNNING,))
        self._call("startProcess", name, False, tolerate=(_ALREADY_STARTED,))

    def process(self, name: str) -> dict[str, Any] | None:
        """supervisor's description (statename, pid, description, …); None where it knows no such program."""
        found = self._call("getProcessInfo", name, tolerate=(_BAD_NAME,))
        return dict(found) if found else None

    def log(self, name: str) -> Path:
        """Where a program's output goes."""
        return self._logs / f"{name}.log"

    def _file(self, name: str) -> Path:
        return self._conf / f"{name}.conf"

    def _call(self, method: str, *arguments: Any, tolerate: tuple[int, ...] = ()) -> Any:
        # A connection a call: calls are rare, and come from several threads.
        transport = _UnixTransport(self._path)
        try:
            proxy: Any = xmlrpc.client.ServerProxy("http://supervisor", transport=transport, allow_none=True)
            return getattr(proxy.supervisor, method)(*arguments)
        except xmlrpc.client.Fault as fault:
            if fault.faultCode in tolerate:
                return None
            raise ServerUnavailable(f"supervisor refuses {method} {arguments}: {fault.faultString}") from fault
        except (OSError, http.client.HTTPException, xmlrpc.client.ProtocolError) as error:
            raise ServerUnavailable(f"supervisor does not answer on {self._path}: {error}") from error
        finally:
            transport.close()


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=RPC_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class _UnixTransport(xmlrpc.client.Transport):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def make_connection(self, host: Any) -> http.client.HTTPConnection:
        return _UnixConnection(self._path)


def _escape(text: str) -> str:
    """supervisor expands %; and a quote would end a value."""
    return text.replace("%", "%%").replace('"', '\\"')
