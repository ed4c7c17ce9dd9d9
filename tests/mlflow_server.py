"""A real MLflow server for tests, started as the embedded stack starts it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MLFLOW = Path(__file__).resolve().parents[1] / ".venv" / "bin" / "mlflow"


@dataclass(frozen=True)
class Server:
    url: str
    folder: Path


@contextmanager
def running(folder: Path) -> Iterator[Server]:
    """A server below `folder`; it ends with the block."""
    import httpx

    from refit.proc import Identity, kill_tree, spawn

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    program = [
        str(MLFLOW), "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
        "--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--serve-artifacts",
        "--artifacts-destination", (folder / "served").as_uri(),
    ]  # fmt: skip
    with (folder / "log").open("wb") as log:
        process = spawn(program, env={**os.environ, **settings}, cwd=folder, stdout=log)
    identity = Identity.of(process.pid)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            assert process.poll() is None, (folder / "log").read_text()[-2000:]
            assert time.monotonic() < deadline, (folder / "log").read_text()[-2000:]
            time.sleep(0.2)
        yield Server(url, folder)
    finally:
        kill_tree(identity, grace=5)
        process.wait()
