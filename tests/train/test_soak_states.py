"""A campaign of random sequences of events on a job (`make soak`): no illegal state, never two writers.

The launchers are real processes that run a job as `trainer run` does, with the real lock and the real token; what
happens to them is drawn by hypothesis: started beside each other, killed at any moment, preempted, failed, finished,
and ranks of dead ones that go on writing. Runs in the control venv, where hypothesis is.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import IO

import pytest

pytest.importorskip("hypothesis", reason="the control venv has it")
import campaign
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from refit.errors import BadInput, Diverged, NodeLost, Occupied, Preempted
from refit.job import Job, JobRun, read_events, run
from refit.manifest import Manifest
from refit.pipeline import load
from refit.states import NEXT, State
from trainer import writer

TINY = Path(__file__).resolve().parents[2] / "dags" / "pipelines" / "tiny.yaml"
SPEC = load(TINY)
ENDS: dict[str, Exception] = {
    "preempted": Preempted("told to stop"), "diverged": Diverged("NaN"), "lost": NodeLost("too often"),
    "refused": BadInput("x"), "crashed": RuntimeError("x"),
}  # fmt: skip


@dataclass
class Launcher:
    """A process that runs the job; what it says, what it is told, and its token once it has one."""

    pid: int
    says: IO[bytes]
    told: IO[bytes]
    token: str = field(default="")
    alive: bool = True

    @classmethod
    def start(cls, job: Job) -> Launcher:
        """Fork one."""
        hear, say = os.pipe()
        take, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(hear), os.close(tell)
            try:
                _launcher(job, os.fdopen(take, "rb", buffering=0), os.fdopen(say, "wb", buffering=0))
            finally:
                os._exit(0)
        os.close(say), os.close(take)
        return cls(pid, os.fdopen(hear, "rb", buffering=0), os.fdopen(tell, "wb", buffering=0))

    def hear(self) -> str:
        """Its next word; nothing where it has ended."""
        return self.says.readline().decode().strip()

    def ask(self, order: str) -> str:
        """Tell it to do something; what it answers."""
        self.told.write(order.encode() + b"\n")
        return self.hear()

    def kill(self) -> None:
        """kill -9."""
        if self.alive:
            os.kill(self.pid, signal.SIGKILL)
        self.reap()

    def reap(self) -> None:
        """It has ended."""
        if self.alive:
            os.waitpid(self.pid, 0)
            self.says.close(), self.told.close()
        self.alive = False


def _launcher(job: Job, orders: IO[bytes], words: IO[bytes]) -> None:
    def say(word: str) -> None:
        words.write(word.encode() + b"\n")

    def handler(running: JobRun) -> Manifest:
        with writer.sole(running.folder, job.output) as token:
            say(f"holds {token}")
            while (order := orders.readline().decode().strip()) != "finish":
                if order in ENDS:
                    raise ENDS[order]
                if order == "retry":
                    running.event(State.RETRYING, "a rank was lost")
                    running.event(State.RUNNING, "again")
                if order == "remark":
                    running.event(State.RUNNING, "loss spike")
                say("done")
            return Manifest(kind="train", fingerprint="f")

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    writer.WAIT_SECONDS = 0.0
    try:
        run(job, handler)
        say("ended")
    except Occupied:
        say("taken")
    except Exception as error:  # noqa: BLE001 (it is what was ordered, or the parent finds out)
        say(f"ended {type(error).__name__}")


class Events(RuleBasedStateMachine):
    """Whatever happens to the launchers of one output."""

    launchers: Bundle[Launcher] = Bundle("launchers")

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="soak-states-"))
        self.job = Job.build("train", SPEC, store=self.root.as_uri(), output=(self.root / "out").as_uri())
        self.all: list[Launcher] = []
        self.tokens: list[str] = []

    def living(self) -> list[Launcher]:
        """Those that hold the output."""
        return [launcher for launcher in self.all if launcher.alive]

    @rule(target=launchers)
    def start(self) -> Launcher:
        held, finished, before = self.living(), (self.root / "out/manifest.json").exists(), self.states()
        launcher = Launcher.start(self.job)
        self.all.append(launcher)
        word = launcher.hear()
        if word.startswith("holds "):
            assert not held, "two writers"
            assert not finished, "a finished job is not done again"
            again = [State.RETRYING, State.RUNNING] if before else [State.RUNNING]
            assert self.states()[len(before) :] == again, "an attempt after another, killed or not, is a retry"
            launcher.token = word.partition(" ")[2]
            self.tokens.append(launcher.token)
        else:
            assert word == ("ended" if finished else "taken"), word
            assert finished or held, "nobody is there, and it is refused"
            launcher.reap()
        return launcher

    @rule(launcher=launchers, order=st.sampled_from(["retry", "remark", "finish", *ENDS]))
    def order(self, launcher: Launcher, order: str) -> None:
        if not launcher.alive:
            return
        word = launcher.ask(order)
        if order in ("retry", "remark"):
            assert word == "done", word
            return
        expected = {"finish": "ended"} | {name: f"ended {type(error).__name__}" for name, error in ENDS.items()}
        assert word == expected[order]
        launcher.reap()
        ended = {"finish": "succeeded", "preempted": "suspended"}.get(order, "failed")
        assert self.states()[-1] == ended

    @rule(launcher=launchers)
    def kill(self, launcher: Launcher) -> None:
        launcher.kill()

    @rule(launcher=launchers)
    def a_rank_that_outlived_it_would_commit(self, launcher: Launcher) -> None:
        """Only the newest token opens the door, whoever has died since."""
        if launcher.token:
            assert writer.holds(self.job.output, launcher.token) == (launcher.token == self.tokens[-1])

    @invariant()
    def one_writer(self) -> None:
        assert len(self.living()) <= 1

    @invariant()
    def every_change_is_one_that_is_drawn(self) -> None:
        states = self.states()
        assert states[:1] in ([], [State.RUNNING])
        for now, then in pairwise(states):
            assert then in NEXT[now] or (now is then is State.RUNNING), f"{now} became {then}"
        assert State.SUCCEEDED not in states[:-1]
        assert (State.SUCCEEDED in states) == (self.root / "out/manifest.json").exists()

    def states(self) -> list[State]:
        """The states that were recorded, whose numbers have no gap and no twin."""
        file = self.root / "out/events.jsonl"
        events = read_events(file.read_text()) if file.is_file() else []
        assert [event["sequence"] for event in events] == list(range(1, len(events) + 1))
        return [State(event["state"]) for event in events]

    def teardown(self) -> None:
        for launcher in self.all:
            launcher.kill()
        shutil.rmtree(self.root)


def test_whatever_happens_no_state_is_illegal_and_nobody_writes_beside_another() -> None:
    """kubeflow/trainer#3779 reset its budget in a state that it could not be in."""
    count = campaign.size(10_000, 20)
    block = min(count, 200)

    def case(number: int, _rng: object) -> campaign.Facts:
        machine = seed(campaign.SEED * 1_000_003 + number)(type("Events", (Events,), {}))
        run_state_machine_as_test(machine, settings=settings(
            max_examples=block, stateful_step_count=15, deadline=None, database=None, derandomize=False,
            phases=[Phase.generate, Phase.shrink], suppress_health_check=list(HealthCheck),
        ))  # fmt: skip
        return {"sequences": block}

    campaign.run("states", max(1, count // block), case)
