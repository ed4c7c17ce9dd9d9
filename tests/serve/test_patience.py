"""vLLM's own readers, as installed: they sleep while they wait, and wake at once when there is something to read."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

COMPUTE = Path(__file__).parents[2] / ".venv-compute" / "bin" / "python"

PROGRAM = """
import json, threading, time
from serving.patience import register
register(); register()
import torch
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
writer = MessageQueue(1, 1)
reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
threading.Thread(target=reader.wait_until_ready).start(); writer.wait_until_ready()
def read():
    began, used = time.monotonic(), time.thread_time()
    reader.dequeue(timeout=10)
    return time.monotonic() - began, time.thread_time() - used
def late(): time.sleep(0.5); writer.enqueue("x")
writer.enqueue("x"); read()
thread = threading.Thread(target=late); thread.start()
waited, used = read(); thread.join()
print(json.dumps({"waited": waited, "used": used}))
"""


@pytest.mark.integration
@pytest.mark.parametrize(("spin", "sleeps"), [("0.005", True), ("", False)])
def test_a_reader_waits_without_a_core(spin: str, sleeps: bool) -> None:
    """Right after a message vLLM looks for the next one for a second on end, unless it is told to sleep."""
    done = subprocess.run(
        [COMPUTE, "-c", PROGRAM], env={"REFIT_SPIN_SECONDS": spin, "PATH": "/usr/bin:/bin", "HOME": str(Path.home())},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert 0.45 < found["waited"] < 3
    assert (found["used"] < 0.25 * found["waited"]) == sleeps, found
