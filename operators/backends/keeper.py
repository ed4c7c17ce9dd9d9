"""Stands over one local job: makes it the only one of its kind, and writes down how it ended.

    python -m operators.backends.keeper FOLDER PROGRAM [ARGUMENT …]

Purpose: whoever starts a job leaves at once (a deferred task frees its worker), so nobody is there to be told the exit
code. The keeper is the job's parent, and stays.

Mechanism: it holds a lock on FOLDER/lock for as long as it lives; the kernel lets go of it at any death, so a second
keeper runs exactly when no other does. Then it ends what an earlier keeper may have left (found by the job's mark in
the environment), records who it is, and starts the program, which dies with it (PR_SET_PDEATHSIG).

What it does not do: restart anything, or judge: `exit.json` holds the code as it came.

Files in FOLDER: lock, process.json (the keeper's identity), output.log (what the program printed), exit.json.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from refit import files, proc

LOCK, PROCESS, OUTPUT, EXIT = "lock", "process.json", "output.log", "exit.json"
ANOTHER_RUNS = 75
"""The keeper's own exit code (EX_TEMPFAIL) when it found another in its place."""

LEFTOVER_GRACE = 5.0
"""Seconds that what a program left behind gets to end by itself."""

_PR_SET_PDEATHSIG = 1


def keep(folder: Path, argv: list[str]) -> int:
    """Run one program to its end. Returns the keeper's own exit code, not the program's."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return ANOTHER_RUNS
    tag = os.environ[proc.TAG]
    # A keeper that was killed took its lock with it, but perhaps not every process of its job.
    proc.kill_tree(None, tag=tag, grace=LEFTOVER_GRACE)
    record = {"identity": proc.Identity.of(os.getpid()).to_json(), "argv": argv, "at": time.time()}
    files.write(folder / PROCESS, json.dumps(record).encode())
    (folder / EXIT).unlink(missing_ok=True)
    with (folder / OUTPUT).open("ab") as output:
        code = _run(argv, output.fileno())
    proc.kill_tree(None, tag=tag, grace=LEFTOVER_GRACE)
    files.write(folder / EXIT, json.dumps({"code": code, "at": time.time()}).encode())
    return 0


def _run(argv: list[str], output: int) -> int:
    """The program's exit code; minus the signal's number when a signal ended it."""
    parent = os.getpid()
    try:
        child = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, preexec_fn=lambda: _die_with(parent)
        )
    except OSError as error:
        os.write(output, f"{argv[0]}: cannot be started: {error}\n".encode())
        return 127

    def pass_on(number: int, _frame: FrameType | None) -> None:
        child.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    return child.wait()


def _die_with(parent: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(128 + signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(keep(Path(sys.argv[1]), sys.argv[2:]))
