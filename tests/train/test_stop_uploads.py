"""A stop while a checkpoint goes up to S3: a whole one or none, and the next start goes on from what is whole.

moto is in the control venv, torch in the other one: its server runs as a program of the former.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from conftest import House

from refit.store import store_for
from tests.proxy import Proxy, breaking
from trainer import checkpoints

CONTROL = Path(__file__).resolve().parents[2] / ".venv" / "bin" / "python"
SETS = ("train.checkpoint.grace_seconds=8",)

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not CONTROL.exists(), reason="moto is in the control venv"),
]


@pytest.fixture
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """An S3 with the bucket `refit`, and the way to it; this process asks it directly, as who looks on from outside."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [CONTROL, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stderr=subprocess.DEVNULL
    )
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1", "REFIT_CACHE": str(tmp_path / "cache"),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    try:
        while socket.socket().connect_ex(("127.0.0.1", port)) != 0:
            assert server.poll() is None
            time.sleep(0.1)
        boto3.client("s3").create_bucket(Bucket="refit")
        with breaking("127.0.0.1", port, []) as proxy:
            yield proxy
    finally:
        server.kill()
        server.wait()


def start(house: House, network: Proxy, output: str, *more: str) -> subprocess.Popen[str]:
    through = {**os.environ, "OMP_NUM_THREADS": "1", "AWS_ENDPOINT_URL": f"http://127.0.0.1:{network.port}"}
    argv = house.argv("run", "--output", output, "--store", house.uri("stop-models"), sets=(*SETS, *more))
    return subprocess.Popen(argv, env=through, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def left(output: str) -> tuple[list[str], list[Any]]:
    """What lies below the checkpoint of step 8, and uploads that were not ended."""
    client, (bucket, key) = boto3.client("s3"), output.removeprefix("s3://").split("/", 1)
    found = client.list_objects_v2(Bucket=bucket, Prefix=f"{key}/checkpoints/step-8/").get("Contents", [])
    return [item["Key"] for item in found], client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])


def test_a_stop_while_a_checkpoint_hangs_in_its_upload_ends_in_the_grace_period_and_costs_that_checkpoint(
    house: House, network: Proxy, trained: dict[str, Any]
) -> None:
    output = "s3://refit/stopped"
    network.hold = b"/checkpoints/step-8/state-rank-0.safetensors"
    running = start(house, network, output)
    assert network.held.wait(300)
    running.send_signal(signal.SIGTERM)
    running.communicate(timeout=120)  # no more: a pod is killed after its grace period
    network.hold = None
    assert running.returncode == 20
    assert [one.step for one in checkpoints.committed(output)] == [4]
    assert left(output)[0], "there is something to clear up"
    again = start(house, network, output)
    told, said = again.communicate(timeout=300)
    assert again.returncode == 0, said
    assert '"resumed_from": 4' in told
    assert trained["model_digest"] in told
    assert [one.step for one in checkpoints.committed(output)] == [12, 8, 4]
    assert left(output)[1] == []
    assert b'"suspended"' in store_for(output).read(f"{output}/events.jsonl")


def test_a_stop_while_a_checkpoint_goes_up_waits_for_it(house: House, network: Proxy) -> None:
    output = "s3://refit/waited"
    network.hold = b"/checkpoints/step-8/state-rank-0.safetensors"
    running = start(house, network, output, "train.max_steps=60")
    assert network.held.wait(300)
    running.send_signal(signal.SIGTERM)
    network.hold = None
    _, said = running.communicate(timeout=300)
    assert running.returncode == 20, said
    newest = next(checkpoints.committed(output))
    assert newest.step >= 8
    assert checkpoints.verify(newest.uri).step == newest.step
