"""A rank: started by the launcher as `python -m trainer.rank TASK`, ends with it.

Exits with the contract's code; why, it says on the wire.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from refit.errors import RefitError
from trainer import imports
from trainer.task import Task, Wire

PARENT = "REFIT_LAUNCHER_PID"
_PR_SET_PDEATHSIG = 1


class _Stop:
    """Set by SIGTERM, read between steps: how many seconds ago it came, 0 when it has not."""

    asked_at: float | None = None

    def __call__(self) -> float:
        return 0.0 if self.asked_at is None else max(1e-9, time.monotonic() - self.asked_at)

    def handle(self, _number: int, _frame: FrameType | None) -> None:
        self.asked_at = self.asked_at or time.monotonic()


def main() -> int:
    """Do the task in the file that the first argument names."""
    tie_to_launcher()
    stop = _Stop()
    signal.signal(signal.SIGTERM, stop.handle)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the launcher's to handle
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the launcher asks a hung rank where it stands
    task = Task.model_validate_json(Path(sys.argv[1]).read_bytes())
    wire = Wire.from_environment()
    try:
        result = _work(task, wire, stop)
    except RefitError as error:
        wire.error(error)
        return error.exit_code
    wire.send("result", **result)
    return 0


def tie_to_launcher() -> None:
    """Have the kernel kill this process when its launcher ends, however that ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # It may have ended before the call: then we belong to somebody else already.
    if os.getppid() != int(os.environ.get(PARENT, os.getppid())):
        os.kill(os.getpid(), signal.SIGKILL)


def _work(task: Task, wire: Wire, stop: _Stop) -> dict[str, Any]:
    imports.of(task)  # torch and its friends, seconds of them: not before we are tied
    from trainer import work

    wire.beat()
    return work.run(task, wire, stop)


def leave(exit_code: int) -> NoReturn:
    """End this process at once.

    All that a rank leaves is written and synced by now. To take apart what was imported would be a second of processor
    time of every rank, for which the launcher waits.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    code = 1
    try:
        code = main()
    finally:
        if sys.exc_info()[1] is not None:  # the last words of the log, which the launcher shows
            sys.excepthook(*sys.exc_info())
        leave(code)
