"""A campaign of kills inside every system call by which a save and its retention change the disk (`make soak`).

First the calls of one save are listed, with what a kill before each of them would leave on the disk: looked at as a
resume looks at it. Then case n is a run of its own, killed before the n-th of them is carried out; the launcher lives
on, and nobody helps.
"""

from __future__ import annotations

import json
import os
import platform
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import campaign
import pytest
from conftest import House

from trainer import checkpoints
from trainer.writer import MARK

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="syscalls.py knows the calls' numbers on x86-64 only"),
]

STEPS, EVERY = 16, 4
"""Four saves; the last one throws the first away."""

SETS = (
    "train.method=lora", "train.zero_stage=2", "train.lora.dropout=0.1", f"train.max_steps={STEPS}",
    f"train.checkpoint.every_steps={EVERY}", "train.heartbeat_seconds=0.2",
)  # fmt: skip


def traced(house: House, name: str, call: int) -> tuple[dict[str, Any], list[str], str]:
    """A training that is killed in a call of its last save (0: in none): its answer, the calls, what it said."""
    folder = house.root / name
    log = house.root / f"{name}.calls"
    tracer = [sys.executable, str(Path(__file__).with_name("syscalls.py")), str(log), MARK, str(call)]
    argv = house.argv("run", "--output", house.uri(name), "--ranks", "2", sets=SETS)
    done = subprocess.run(
        [*tracer, str(folder / "checkpoints"), f"step-{STEPS}", "--", *argv], capture_output=True, text=True,
        timeout=900, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    calls = [line.replace(str(folder), "") for line in log.read_text().splitlines()]
    return json.loads(done.stdout.splitlines()[-1]), calls, done.stderr


@pytest.fixture(scope="module")
def undisturbed(house: House) -> tuple[dict[str, Any], list[str]]:
    answer, calls, _ = traced(house, "soak-saves-undisturbed", 0)
    return answer, calls


def test_whatever_a_kill_leaves_of_a_save_the_newest_whole_checkpoint_is_found(
    house: House, undisturbed: tuple[dict[str, Any], list[str]], tmp_path: Path
) -> None:
    answer, calls = undisturbed
    committed = commit(calls)
    for number in range(1, len(calls) + 1):
        output = tmp_path / str(number)
        output.mkdir()
        (house.root / f"soak-saves-undisturbed.calls.{number}").rename(output / "checkpoints")
        found = checkpoints.newest(output.as_uri(), answer["fingerprint"])
        assert found is not None
        assert found.step == (STEPS if number > committed + 1 else STEPS - EVERY), calls[number - 1]
        checkpoints.clear_drafts(output.as_uri())
        assert not list((output / "checkpoints").glob(".draft-*"))


def commit(calls: list[str]) -> int:
    """Which of the calls gives the checkpoint its name."""
    return max(number for number, line in enumerate(calls) if line.endswith(f"/step-{STEPS}"))


def test_a_save_killed_in_any_of_its_system_calls_costs_an_interval_at_most(
    house: House, undisturbed: tuple[dict[str, Any], list[str]]
) -> None:
    """DeepSpeed#2898 and its kin: `latest` that names half a checkpoint; transformers#35782: weights without state."""
    whole, calls = undisturbed
    names = [line.partition(" ")[0] for line in calls]
    assert {"mkdir", "write", "fsync", "rename", "unlink", "rmdir"} <= set(names), "a save, and what retention removes"
    print(f"{len(calls)} calls: " + " ".join(names), file=sys.stderr)

    def case(number: int, _rng: random.Random) -> campaign.Facts:
        call = chosen[number]
        name = f"soak-saves-{call}"
        answer, seen, said = traced(house, name, call + 1)
        assert len(seen) == call + 1, "killed later than asked for"
        assert "ended by signal 9" in said
        assert answer["model_digest"] == whole["model_digest"]
        assert house.losses(name) == house.losses("soak-saves-undisturbed")
        lost = STEPS - answer["resumed_from"]
        assert lost in (0, EVERY), seen[-1]
        kept = [found.step for found in checkpoints.committed(house.uri(name))]
        assert kept in ([16, 12, 8], [16, 12, 8, 4]), "one more where there was no save after the kill"
        left = {path.name for path in (house.root / name / "checkpoints").iterdir()}
        assert left == {f"step-{step}" for step in kept}, "nothing half-written, nothing half-removed"
        shutil.rmtree(house.root / name)
        return {"call": seen[-1].partition(" ")[0], "lost": lost}

    # In `make test` the rename that is the commit, and the first removal after it.
    removal = next(number for number, line in enumerate(calls) if line.startswith("unlink") and f"step-{EVERY}" in line)
    every = list(range(len(calls)))
    chosen = every if campaign.COUNT is not None else [commit(calls), removal]
    campaign.run("saves", campaign.size(len(chosen), len(chosen)), case)
