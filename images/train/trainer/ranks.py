"""The ranks of one launch: started, listened to, watched for silence, ended whole.

They are direct children of the launcher, tied to it by the kernel (`rank.tie_to_launcher`), and meet in a file: no
port, no elastic agent, no session of their own that a kill could miss.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from trainer.machine import cores
from trainer.rank import PARENT
from trainer.silence import Patience
from trainer.task import BEAT, WIRE, Task, heard
from trainer.writer import MARK

DUMP_SECONDS = 0.5
"""How long a hung rank gets to write where it stands."""

GATHER_SECONDS, GATHER_STEPS_SECONDS = 0.05, 0.25
"""Who spoke is let speak on for so long, and while steps are taken longer: the launcher's own work is for many messages
at once, and takes the processors from nobody with each."""

WIRE_BYTES = 1 << 20
"""What a rank can say in that time without being waited for; as much as Linux lets anybody ask for."""

PROGRESS = (BEAT, "step")
"""What every rank says as often as any other; rank 0 has more to say."""


@dataclass
class Rank:
    """One rank: its process, its end of the wire, and what was last heard on it."""

    number: int
    process: subprocess.Popen[bytes]
    wire: int
    log: Path
    buffer: bytes = b""
    heard: float = field(default_factory=time.monotonic)
    progress: int = 0

    @property
    def stopped(self) -> bool:
        """Whether the process is held by SIGSTOP or a debugger."""
        try:
            status = Path(f"/proc/{self.process.pid}/stat").read_text(errors="replace")
        except OSError:
            return False
        return status.rpartition(")")[2].split()[0] in "Tt"

    def tail(self, lines: int = 12) -> str:
        """The end of the rank's log."""
        text = self.log.read_text(errors="replace") if self.log.is_file() else ""
        return "\n".join(text.splitlines()[-lines:])


class Ranks:
    """All ranks of a launch; a context, at whose end none of them runs."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._patience = Patience(task.train)
        self._selector = selectors.DefaultSelector()
        self.members: list[Rank] = []
        self.listened = time.monotonic()
        """When it was last looked whether anybody speaks: who was not listened to since may have spoken."""

    def __enter__(self) -> Ranks:
        folder = self._task.folder / "ranks"
        folder.mkdir(parents=True, exist_ok=True)
        document = folder / "task.json"
        document.write_text(self._task.model_dump_json(), encoding="utf-8")
        self._task.rendezvous.unlink(missing_ok=True)
        for number in range(self._task.ranks):
            log = folder / f"rank-{number}.log"
            with log.open("ab") as output:
                self._start(number, document, log, output)
        return self

    def _start(self, number: int, document: Path, log: Path, output: IO[bytes]) -> None:
        listen, speak = os.pipe()
        with contextlib.suppress(OSError):  # a user's pipes have a limit together; a small one does too
            fcntl.fcntl(speak, fcntl.F_SETPIPE_SZ, WIRE_BYTES)
        process = subprocess.Popen(
            [sys.executable, "-m", "trainer.rank", str(document)], env=environment(self._task, number, speak),
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=(speak,), cwd=self._task.folder,
        )  # fmt: skip
        os.close(speak)
        os.set_blocking(listen, False)
        member = Rank(number, process, listen, log)
        self.members.append(member)
        self._selector.register(listen, selectors.EVENT_READ, member)

    def __exit__(self, *_: object) -> None:
        for member in self.members:
            if member.process.poll() is None:
                member.process.kill()
        for member in self.members:
            member.process.wait()
            os.close(member.wire)
        self._selector.close()
        self._task.rendezvous.unlink(missing_ok=True)

    def messages(self, timeout: float) -> list[tuple[Rank, dict[str, Any]]]:
        """What the ranks said; waits at most `timeout` seconds for something."""
        said = []
        if self._selector.select(timeout):
            time.sleep(GATHER_STEPS_SECONDS if self._patience.is_stepping else GATHER_SECONDS)
        spoke = self._selector.select(0)
        self.listened = time.monotonic()
        for key, _ in spoke:
            member: Rank = key.data
            data = os.read(member.wire, WIRE_BYTES)
            if not data:
                self._selector.unregister(member.wire)  # its end; the process tells the rest
                continue
            *lines, member.buffer = (member.buffer + data).split(b"\n")
            for line in lines:
                message = heard(line)
                self._patience.heard(message["kind"], self.listened - member.heard)
                said.append((member, message))
                member.progress += message["kind"] in PROGRESS
            member.heard = self.listened
        return said

    def wait(self, seconds: float) -> None:
        """Give the ranks time to end by themselves."""
        deadline = time.monotonic() + seconds
        while len(self.ended()) < len(self.members) and time.monotonic() < deadline:
            time.sleep(0.05)

    def ended(self) -> list[Rank]:
        """The ranks that have ended."""
        return [member for member in self.members if member.process.poll() is not None]

    def hung(self) -> Rank | None:
        """The rank that keeps the others waiting, when there was silence for too long; its stack is in its log."""
        found = self.silent(self._patience.seconds, by_itself=self._patience.is_stepping)
        if found is not None:
            self.signal(signal.SIGUSR1)
            time.sleep(DUMP_SECONDS)
        return found

    def silent(self, seconds: float, *, by_itself: bool = True) -> Rank | None:
        """The rank that keeps the others waiting, of those that have said nothing for so long.

        Where no steps are taken one rank may work for long while the others wait: none is silent `by_itself` then.
        """
        silent = [member for member in self.members if self.listened - member.heard >= seconds]
        if not by_itself and len(silent) < len(self.members):
            return None
        # All are silent when one hangs, for the others wait for it: it is the one that is held, or got least far.
        return min(silent, key=lambda member: (not member.stopped, member.progress, member.heard), default=None)

    @property
    def patience(self) -> float:
        """How many seconds of silence are allowed now."""
        return self._patience.seconds

    def signal(self, number: signal.Signals) -> None:
        """Signal every rank that runs."""
        for member in self.members:
            if member.process.poll() is None:
                member.process.send_signal(number)


def environment(task: Task, number: int, wire: int) -> dict[str, str]:
    """What a rank finds in its environment."""
    return {
        **os.environ,
        "RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(task.ranks),
        # Asked for by DeepSpeed, used by nobody: the ranks meet in a file.
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "DS_ACCELERATOR": "cuda" if task.train.gpus_per_node else "cpu",
        # More threads than cores make each other wait; and waiting by spinning starves whoever else runs here.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores() // task.ranks))),
        "OMP_WAIT_POLICY": "passive",
        "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        WIRE: str(wire), PARENT: str(os.getpid()), MARK: task.job.output,
    }  # fmt: skip
