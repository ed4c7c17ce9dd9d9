"""The demo's users: `serving replay`, a stand-in that says so, run beside the line and counted at the end."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from refit import files
from standalone.home import root

USERS = 2000
STOP_SECONDS = 180.0


class StandIn:
    """Replayed users of a line, at one rate at a time; `counts` adds up all that were ever asked.

    They run under the stack's mark, so that whatever happens to the demo, `make down` ends them too.
    """

    def __init__(self, pipeline: str, folder: Path, environment: Mapping[str, str]) -> None:
        self._pipeline = pipeline
        self._folder = folder
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._shifts: list[Path] = []

    def ask(self, items: Path, *, rate: float) -> None:
        """Let the users come at `rate` requests a second; those that come now finish what they asked first."""
        self.leave()
        shift = self._folder / f"users-{len(self._shifts)}"
        files.write(shift.with_suffix(".json"), b"{}")
        shift.with_suffix(".stop").unlink(missing_ok=True)
        with shift.with_suffix(".log").open("wb") as log:
            self._process = subprocess.Popen(
                [str(root() / ".venv" / "bin" / "serving"), "replay", "--pipeline", self._pipeline,
                 "--items", str(items), "--users", str(USERS), "--rate", str(rate), "--seed", str(len(self._shifts)),
                 "--stats", str(shift.with_suffix(".json")), "--until-file", str(shift.with_suffix(".stop"))],
                env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self._shifts.append(shift)

    def leave(self) -> None:
        """Ask nothing more, and wait until everything asked is answered."""
        if self._process is None:
            return
        files.write(self._shifts[-1].with_suffix(".stop"), b"")
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            print("demo: users still wait for answers; they are sent home", file=sys.stderr)
            self._process.kill()
            self._process.wait()
        self._process = None

    def counts(self) -> dict[str, int]:
        """Requests so far: `total`, `failed`, `failed_on_killed`, `retried`, `resolved`."""
        sums = dict.fromkeys(("total", "failed", "failed_on_killed", "retried", "resolved"), 0)
        for shift in self._shifts:
            stats = json.loads(shift.with_suffix(".json").read_text(encoding="utf-8"))
            for name in sums:
                sums[name] += int(stats.get(name, 0))
        return sums
