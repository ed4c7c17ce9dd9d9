"""Kill a rank inside a given system call: `python syscalls.py LOG MARK N BELOW FROM -- PROGRAM ARGUMENT…`.

Starts a training, and holds rank 0 at each system call by which it changes something in the folder BELOW, from the
first on whose path has FROM in it (ptrace(2), as strace does it). Before the N-th of them is carried out the rank is
killed; with 0 none is, and what a kill would leave of the folder is laid to LOG.1, LOG.2, …. What was seen is written
to LOG, a line a call, and the exit code is the program's. MARK is the environment variable that tells the program's
ranks from other processes.

Linux on x86-64 only, for the numbers of its calls.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

SEIZE, INTERRUPT, SYSCALL, GET_SYSCALL_INFO = 0x4206, 0x4207, 24, 0x420E
TRACE_SYSGOOD, TRACE_CLONE = 1, 8
EVENT_STOP = 128
WALL = 0x40000000
AT_FDCWD = 0xFFFFFFFFFFFFFF9C
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT

BY_DESCRIPTOR = {1: "write", 18: "pwrite64", 20: "writev", 74: "fsync", 75: "fdatasync", 77: "ftruncate",
                 285: "fallocate"}  # fmt: skip
BY_PATH = {
    2: ("open", None, 0), 82: ("rename", None, 1), 83: ("mkdir", None, 0), 84: ("rmdir", None, 0),
    86: ("link", None, 1), 87: ("unlink", None, 0), 257: ("openat", 0, 1), 258: ("mkdirat", 0, 1),
    263: ("unlinkat", 0, 1), 264: ("renameat", 2, 3), 265: ("linkat", 2, 3), 316: ("renameat2", 2, 3),
}  # fmt: skip
"""Name, and which arguments are the folder (a descriptor) and the path that comes to be, or goes."""


class Entry(ctypes.Structure):
    """`struct ptrace_syscall_info` at the entry of a call."""

    _fields_ = [
        ("op", ctypes.c_uint8), ("pad", ctypes.c_uint8 * 3), ("arch", ctypes.c_uint32), ("ip", ctypes.c_uint64),
        ("sp", ctypes.c_uint64), ("number", ctypes.c_uint64), ("arguments", ctypes.c_uint64 * 6),
    ]  # fmt: skip


_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def ptrace(request: int, thread: int, address: int = 0, data: int = 0) -> None:
    """Raises OSError; ESRCH where the thread is gone."""
    if _libc.ptrace(request, thread, address, data) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def seize(pid: int) -> None:
    """Hold every thread of a process, and those that it will start."""
    for thread in map(int, os.listdir(f"/proc/{pid}/task")):
        ptrace(SEIZE, thread, 0, TRACE_SYSGOOD | TRACE_CLONE)
        ptrace(INTERRUPT, thread)


def change(thread: int) -> tuple[str, str] | None:
    """Name and path of the call that a thread is about to make, where it changes something."""
    entry = Entry()
    ptrace(GET_SYSCALL_INFO, thread, ctypes.sizeof(entry), ctypes.addressof(entry))
    if entry.op != 1:
        return None
    number, arguments = int(entry.number), list(entry.arguments)
    if number in BY_DESCRIPTOR:
        return BY_DESCRIPTOR[number], _link(f"/proc/{thread}/fd/{arguments[0]}")
    if number not in BY_PATH:
        return None
    name, folder, path = BY_PATH[number]
    if name.startswith("open") and not arguments[path + 1] & WRITES:
        return None
    text = _string(thread, arguments[path])
    if not text.startswith("/"):
        here = folder is None or arguments[folder] & 0xFFFFFFFF == AT_FDCWD & 0xFFFFFFFF
        text = os.path.join(_link(f"/proc/{thread}/" + ("cwd" if here else f"fd/{arguments[folder or 0]}")), text)
    return name, text


def stops(launcher: subprocess.Popen[bytes]) -> Iterator[int]:
    """The threads that stand at a system call, until the launcher ends; each is let go when the next is asked for."""
    while True:
        thread, status = os.waitpid(-1, WALL)
        if thread == launcher.pid and not os.WIFSTOPPED(status):
            launcher.returncode = os.waitstatus_to_exitcode(status)
            return
        if not os.WIFSTOPPED(status):
            continue
        pass_on, event = os.WSTOPSIG(status), status >> 16
        if pass_on == signal.SIGTRAP | 0x80:
            yield thread
        with suppress(ProcessLookupError):  # it was killed
            ptrace(SYSCALL, thread, 0, 0 if event or pass_on & 0x7F == signal.SIGTRAP else pass_on)


def rank_0(mark: str, below: str) -> int | None:
    """The pid of rank 0 of the training in whose folder `below` lies."""
    for name in os.listdir("/proc"):
        try:
            variables = Path("/proc", name, "environ").read_bytes().split(b"\0") if name.isdigit() else []
        except OSError:
            continue
        ours = any(one.startswith(f"{mark}=".encode()) and os.fsencode(Path(below).parent) in one for one in variables)
        if ours and b"RANK=0" in variables:
            return int(name)
    return None


def main() -> int:
    """Run the program."""
    split = sys.argv.index("--")
    log, mark, count, below, start = sys.argv[1:split]
    launcher = subprocess.Popen(sys.argv[split + 1 :])
    steps = Path(below).parent / "metrics.jsonl"
    while not (steps.exists() and steps.stat().st_size):  # before its first step there is nothing to look at
        if launcher.poll() is not None:
            return launcher.returncode
        time.sleep(0.01)
    victim = rank_0(mark, below)
    if victim is None:
        raise SystemExit("no rank 0 runs")
    seize(victim)
    seen = 0
    with open(log, "w", encoding="utf-8") as out:
        for thread in stops(launcher):
            try:
                made = change(thread)
            except (OSError, ValueError):
                continue  # it was killed meanwhile
            if made is None or not made[1].startswith(below) or not (seen or start in made[1]):
                continue
            seen += 1
            print(*made, file=out, flush=True)
            if seen == int(count):
                os.kill(victim, signal.SIGKILL)
            elif count == "0":  # of what another rank takes away meanwhile nothing is copied, and nothing is missed
                subprocess.run(["cp", "-r", below, f"{log}.{seen}"], stderr=subprocess.DEVNULL, check=False)
    return launcher.returncode


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _string(thread: int, address: int) -> str:
    with open(f"/proc/{thread}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        return memory.read(4096).partition(b"\0")[0].decode(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
