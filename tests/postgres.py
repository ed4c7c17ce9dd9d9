"""A real PostgreSQL for tests. What starts it is imported when it is: not all tests run where it can."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def running(folder: Path) -> Iterator[tuple[Any, Any]]:
    """The home and ports of a server below `folder`; it ends with the block."""
    from refit.proc import Identity, kill_tree, spawn
    from standalone import postgres, probes
    from standalone.home import Home
    from standalone.ports import free_ports

    home, ports = Home(folder), free_ports()
    home.make_folders()
    home.make_secrets()
    postgres.make_cluster(home)
    with (home.logs / "postgres.log").open("wb") as log:
        child = spawn(postgres.server_argv(home, ports), cwd="/", stdout=log)
    identity = Identity.of(child.pid)
    try:
        deadline = time.monotonic() + 60
        while probes.postgres(home, ports, 0.0) and time.monotonic() < deadline:
            time.sleep(0.1)
        postgres.make_databases(home, ports)
        yield home, ports
    finally:
        kill_tree(identity)
        child.wait()
