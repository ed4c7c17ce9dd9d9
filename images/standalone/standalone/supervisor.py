"""Talking to supervisord over its unix socket."""

from __future__ import annotations

import http.client
import xmlrpc.client
from pathlib import Path
from types import TracebackType
from typing import Any

from supervisor.xmlrpc import Faults, SupervisorTransport


class Supervisor:
    """A running supervisord. Every call raises `OSError` when it does not answer."""

    def __init__(self, socket: Path) -> None:
        self._transport = SupervisorTransport(None, None, serverurl=f"unix://{socket}")
        # The address is not used (the transport goes to the socket), but the proxy wants one.
        self._rpc: Any = xmlrpc.client.ServerProxy("http://127.0.0.1", transport=self._transport, allow_none=True)

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._transport.close()

    def pid(self) -> int:
        """supervisord's process."""
        return int(self._call("getPID"))

    def processes(self) -> dict[str, dict[str, Any]]:
        """Name → supervisor's description (statename, pid, start, now, spawnerr, …) of every process."""
        return {process["name"]: process for process in self._call("getAllProcessInfo")}

    def running(self) -> set[str]:
        """The names of the processes that run or are being started."""
        wanted = ("RUNNING", "STARTING", "BACKOFF")
        return {name for name, process in self.processes().items() if process["statename"] in wanted}

    def start(self, name: str) -> None:
        """Start a process unless it runs or is being started."""
        self._call("startProcess", name, False, tolerate=(Faults.ALREADY_STARTED,))

    def stop(self, name: str) -> None:
        """Ask a process to stop; does not wait for its end."""
        self._call("stopProcess", name, False, tolerate=(Faults.NOT_RUNNING, Faults.BAD_NAME))

    def update(self) -> list[str]:
        """Read the configuration again and make the groups like it; returns the names of those that it had to stop.

        A group whose section changed is stopped and added anew, not started: the caller starts it in its order.
        """
        added, changed, removed = self._call("reloadConfig")[0]
        stopped = []
        for name in [*changed, *removed]:
            if name in self.running():
                stopped.append(name)
            self._call("stopProcessGroup", name, True, tolerate=(Faults.NOT_RUNNING,))
            self._call("removeProcessGroup", name)
        for name in [*changed, *added]:
            self._call("addProcessGroup", name, tolerate=(Faults.ALREADY_ADDED,))
        return stopped

    def shutdown(self) -> None:
        """Stop every process and end; returns when it has begun."""
        self._call("shutdown", tolerate=(Faults.SHUTDOWN_STATE,))

    def _call(self, method: str, *arguments: Any, tolerate: tuple[int, ...] = ()) -> Any:
        try:
            return getattr(self._rpc.supervisor, method)(*arguments)
        except xmlrpc.client.Fault as fault:
            if fault.faultCode in tolerate:
                return None
            raise OSError(f"supervisor refused {method}{arguments}: {fault.faultString}") from fault
        except (http.client.HTTPException, xmlrpc.client.ProtocolError) as error:
            raise OSError(f"supervisor does not answer: {error}") from error
