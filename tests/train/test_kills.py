"""Whatever is killed, the training ends as if nothing had been: the same losses, the same model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import House

from refit import proc
from trainer.writer import MARK

pytestmark = pytest.mark.integration

STEPS = 24

# Dropout, so that random numbers matter; a clipped LoRA at ZeRO 2, so that state is split over the ranks.
RECIPE = (
    "train.method=lora", "train.lora.dropout=0.1", "train.zero_stage=2", f"train.max_steps={STEPS}",
    "train.checkpoint.every_steps=5", "train.heartbeat_seconds=0.2", "train.hang_seconds=20",
)  # fmt: skip
SECONDS = 600


class Running:
    """A training in a process of its own."""

    def __init__(self, house: House, name: str, ranks: int = 2, sets: tuple[str, ...] = RECIPE) -> None:
        self.house, self.folder = house, house.root / name
        argv = house.argv("run", "--output", house.uri(name), "--ranks", str(ranks), sets=sets)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True
        )

    def ranks(self) -> list[proc.Identity]:
        """The ranks that run."""
        return proc.find_tagged(self.folder.as_uri(), variable=MARK)

    def until(self, happened: Callable[[], bool]) -> None:
        """Wait for something; a training that ends before is a failure."""
        deadline = time.monotonic() + SECONDS
        while not happened():
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def until_step(self, step: int) -> None:
        """Wait until a step is in the metrics."""
        file = self.folder / "metrics.jsonl"
        self.until(lambda: file.is_file() and len(file.read_bytes().splitlines()) >= step)

    def end(self) -> tuple[int, dict, str]:
        """Exit code, answer and log."""
        out, said = self.process.communicate(timeout=SECONDS)
        lines = out.strip().splitlines()
        return self.process.returncode, json.loads(lines[-1]) if lines else {}, said

    def rank(self, number: int) -> int:
        """The pid of a rank."""
        for identity in self.ranks():
            environment = Path(f"/proc/{identity.pid}/environ").read_bytes().split(b"\0")
            if b"RANK=%d" % number in environment:
                return identity.pid
        raise AssertionError(f"no rank {number} runs")


@pytest.fixture(scope="module")
def undisturbed(house: House) -> dict:
    """The run that all others must equal."""
    code, answer, said = Running(house, "undisturbed").end()
    assert code == 0, said
    return answer


@pytest.fixture
def running(house: House, undisturbed: dict, request: pytest.FixtureRequest) -> Iterator[Running]:
    """A training under way, with more in its recipe where a test says so; nothing of it is left behind."""
    run = Running(house, request.function.__name__, sets=(*RECIPE, *getattr(request, "param", ())))
    yield run
    if run.process.poll() is None:
        run.process.kill()
        run.process.wait()
    proc.kill_tree(None, tag=run.folder.as_uri(), variable=MARK, grace=0)


def same(house: House, run: Running, undisturbed: dict, answer: dict) -> None:
    """No step twice, none left out, every number and the model as in the undisturbed run."""
    assert house.losses(run.folder.name) == house.losses("undisturbed")
    assert answer["model_digest"] == undisturbed["model_digest"]


def test_a_killed_rank_costs_a_few_steps_and_nothing_else(house: House, undisturbed: dict, running: Running) -> None:
    running.until_step(12)
    os.kill(running.rank(1), signal.SIGKILL)
    code, answer, said = running.end()
    assert code == 0, said
    assert "ended by signal 9" in said
    assert answer["resumed_from"] in (10, 15, 20), "lost: at most one interval"
    same(house, running, undisturbed, answer)


def test_a_rank_killed_after_steps_and_before_the_first_checkpoint_begins_again(
    house: House, undisturbed: dict, running: Running
) -> None:
    running.until_step(1)
    running.until(lambda: '"loss"' in (running.folder / "status.json").read_text())
    os.kill(running.rank(0), signal.SIGKILL)
    code, answer, said = running.end()
    assert code == 0, said
    same(house, running, undisturbed, answer)


def test_a_killed_launcher_takes_its_ranks_along_and_the_next_goes_on(
    house: House, undisturbed: dict, running: Running
) -> None:
    running.until_step(12)
    left = running.ranks()
    assert len(left) == 2
    running.process.kill()
    running.process.wait()
    deadline = time.monotonic() + 10
    while any(proc.alive(identity) for identity in left):
        assert time.monotonic() < deadline, "ranks outlived their launcher"
        time.sleep(0.01)
    assert not (running.folder / "manifest.json").exists()
    again = Running(house, running.folder.name)
    code, answer, said = again.end()
    assert code == 0, said
    assert answer["resumed_from"] >= 10
    same(house, again, undisturbed, answer)


@pytest.mark.parametrize("running", [("train.hang_seconds=12",)], indirect=True)
def test_a_hung_rank_is_named_and_replaced(house: House, undisturbed: dict, running: Running) -> None:
    running.until_step(7)
    os.kill(running.rank(1), signal.SIGSTOP)
    code, answer, said = running.end()
    assert code == 0, said
    assert "rank 1 said nothing" in said
    assert "held by a signal" in said
    states = [
        (event["state"], event.get("silent_rank", {}).get("rank"))
        for event in map(json.loads, (running.folder / "events.jsonl").read_text().splitlines())
    ]
    assert states.index(("running", 1)) < states.index(("retrying", None)), "named before it is ended"
    same(house, running, undisturbed, answer)


def test_told_to_stop_it_saves_and_says_resume_me(house: House, undisturbed: dict, running: Running) -> None:
    running.until_step(7)
    running.process.send_signal(signal.SIGTERM)
    code, answer, said = running.end()
    assert code == 20, said
    assert answer["error"] == "Preempted"
    done = len(house.metrics(running.folder.name))
    assert (running.folder / "checkpoints" / f"step-{done}" / "manifest.json").is_file(), "not one step is lost"
    assert not running.ranks()
    again = Running(house, running.folder.name)
    code, answer, said = again.end()
    assert code == 0, said
    assert answer["resumed_from"] == done
    same(house, again, undisturbed, answer)


def test_a_second_trainer_waits_and_then_leaves_the_first_alone(
    house: House, undisturbed: dict, running: Running
) -> None:
    running.until_step(1)
    os.kill(running.process.pid, signal.SIGSTOP)  # holds the lock for as long as it takes
    second = Running(house, running.folder.name)
    code, answer, _ = second.end()
    os.kill(running.process.pid, signal.SIGCONT)
    assert code == 30
    assert "another trainer writes there" in answer["message"]
    code, answer, said = running.end()
    assert code == 0, said
    same(house, running, undisturbed, answer)


def test_damaged_newest_checkpoints_are_passed_over(house: House, undisturbed: dict, running: Running) -> None:
    running.until_step(17)
    running.process.kill()
    running.process.wait()
    newest = max((running.folder / "checkpoints").glob("step-*"), key=lambda path: int(path.name.split("-")[1]))
    step = int(newest.name.split("-")[1])
    files = list(newest.glob("state-rank-*.safetensors"))
    assert files
    for file in files:
        file.write_bytes(bytes(file.stat().st_size))
    again = Running(house, running.folder.name)
    code, answer, said = again.end()
    assert code == 0, said
    assert "checkpoint_damaged" in said
    assert answer["resumed_from"] < step
    same(house, again, undisturbed, answer)


def test_a_smoke_run_that_is_told_to_stop_ends_at_once_with_its_ranks(house: House) -> None:
    folder = house.root / "stopped-smoke"
    argv = house.argv("smoke", "--output", folder.as_uri(), sets=("train.smoke_steps=100000",))
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + SECONDS
    while not proc.find_tagged(folder.as_uri(), variable=MARK):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=SECONDS)
    assert process.returncode == 20
    assert not proc.find_tagged(folder.as_uri(), variable=MARK)
