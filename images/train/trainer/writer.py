"""One writer to an output: a lock that ends with its holder, and a token that tells a zombie that its time is over.

The lock (flock) is the kernel's: it is gone the moment the launcher is, however it ended. The token is for what a lock
cannot see, a rank that outlived its launcher or a machine that was thought dead: rank 0 looks at it before every commit
of a checkpoint, the launcher before every launch and with every heartbeat, and one that finds another's token there
stops (`Occupied`: it is not launched again, and writes no event).

Known limit: on S3 there is no lock, only the token, and the look and the commit are two calls.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from refit import proc
from refit.errors import Occupied
from refit.job import Job
from refit.store import join, store_for

LOCK, TOKEN = ".lock", "writer.json"
MARK = "REFIT_TRAINING_OUTPUT"
"""The environment variable that marks the ranks of an output, so that a successor finds what is left of them."""

WAIT_SECONDS = 10.0
"""How long a launcher waits for its predecessor, which may be ending at this moment."""


@contextmanager
def sole(folder: Path, output: str) -> Iterator[str]:
    """Be the only writer of an output; the value is the token.

    Raises:
        Occupied: another launcher of this machine holds the output and goes on holding it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _lock(descriptor, output)
        # Ranks of a killed launcher end by themselves (PR_SET_PDEATHSIG); this makes sure before we write.
        proc.kill_tree(None, tag=output, variable=MARK, grace=0.0)
        token = secrets.token_hex(8)
        holder = {
            "token": token, "host": socket.gethostname(), "pid": os.getpid(), "since": datetime.now(UTC).isoformat(),
        }  # fmt: skip
        store_for(output).write(join(output, TOKEN), json.dumps(holder).encode())
        yield token
    finally:
        os.close(descriptor)


def holds(output: str, token: str) -> bool:
    """Whether a token is still the output's; an output that was taken away is nobody's."""
    try:
        found = json.loads(store_for(output).read(join(output, TOKEN)))
    except FileNotFoundError:
        return False
    return bool(found["token"] == token)


def sign(job: Job) -> None:
    """Have job.json say what is made in an output, for who exports or replays it: to be called once that is ours.

    The one that REFIT_JOB names lies there, and whoever submitted it may have written the next attempt's by now.
    """
    if os.environ.get("REFIT_JOB") != job.uri:
        job.save()


def _lock(descriptor: int, output: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise Occupied(
                    f"{output}: another trainer writes there. Wait for it (trainer status), or stop it."
                ) from error
            time.sleep(0.1)
