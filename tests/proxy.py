"""A network that breaks when it is told to: a TCP proxy that cuts connections after so many bytes of answer."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Proxy:
    """Forwards to `target`. `cuts` are used up one a connection: after so many bytes of answer it is closed."""

    def __init__(self, target: tuple[str, int], cuts: list[int]) -> None:
        self.cuts, self.sent, self.connections = cuts, 0, 0
        # A connection on which this is sent to the target stands still there, until it is None again.
        self.hold: bytes | None = None
        self.held = threading.Event()
        self._target, self._lock = target, threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self.hold = None
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                with self._lock:
                    self.connections += 1
                    left = self.cuts.pop(0) if self.cuts else None
                far = socket.create_connection(self._target)
                threading.Thread(target=self._pump, args=(near, far, None), daemon=True).start()
                threading.Thread(target=self._pump, args=(far, near, left), daemon=True).start()

    def _wait(self, data: bytes) -> None:
        while self.hold is not None and self.hold in data:
            self.held.set()
            time.sleep(0.01)

    def _pump(self, source: socket.socket, sink: socket.socket, left: int | None) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if sink.getpeername() == self._target:
                    self._wait(data)
                data = data if left is None else data[:left]
                sink.sendall(data)
                if source.getpeername() == self._target:
                    with self._lock:
                        self.sent += len(data)
                if left is not None:
                    left -= len(data)
                    if left <= 0:
                        break
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


@contextmanager
def breaking(host: str, port: int, cuts: list[int]) -> Iterator[Proxy]:
    proxy = Proxy((host, port), cuts)
    try:
        yield proxy
    finally:
        proxy.close()
