"""Campaigns of kills at random moments (`make soak`): one in a run, and many in one run.

Half of the moments are spread over the whole run, with its start and its end, half over its steps. Whatever was killed,
nobody helps: a launcher's death is answered by calling the same command again, as Airflow does.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import campaign
import pytest
from conftest import House
from test_kills import RECIPE, Running

pytestmark = pytest.mark.integration

STEPS, EVERY = 60 if campaign.COUNT is not None else 30, 5
SETS = (*RECIPE, f"train.max_steps={STEPS}", f"train.checkpoint.every_steps={EVERY}", "train.max_restarts=100")
VICTIMS = ("launcher", "rank 0", "rank 1")


@pytest.fixture(scope="module")
def whole(house: House) -> dict[str, Any]:
    """The undisturbed run, and how many seconds it took."""
    began = time.monotonic()
    code, answer, said = Running(house, "soak-undisturbed", sets=SETS).end()
    assert code == 0, said
    return {**answer, "took": time.monotonic() - began}


def kill(running: Running, victim: str) -> tuple[bool, int]:
    """Kill one of the run's processes; whether it was there, and how many steps were finished then."""
    if running.process.poll() is not None:
        return False, 0
    try:
        target = running.process.pid if victim == "launcher" else running.rank(int(victim[-1]))
        os.kill(target, signal.SIGKILL)
    except (AssertionError, ProcessLookupError, FileNotFoundError):
        return False, 0  # it has not started yet, or ended: nothing is killed, and nothing may differ
    return True, steps(running.folder)


def steps(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.is_file() else 0


def being_written(folder: Path) -> int | None:
    """The step of a checkpoint that is on its way to the disk."""
    drafts = [path.name.split("-")[2] for path in folder.glob("checkpoints/.draft-step-*")]
    return max(map(int, drafts), default=None)


def same(house: House, name: str, whole: dict[str, Any], answer: dict[str, Any]) -> None:
    assert house.losses(name) == house.losses("soak-undisturbed")
    assert answer["model_digest"] == whole["model_digest"]


def test_a_training_killed_at_any_moment_ends_as_if_nothing_had_been(house: House, whole: dict[str, Any]) -> None:
    def case(number: int, rng: random.Random) -> campaign.Facts:
        victim, anywhere = rng.choice(VICTIMS), rng.random() < 0.5
        share, step, delay = rng.random(), rng.randint(1, STEPS), rng.random() * 0.2
        name = f"soak-kill-{number}"
        running = Running(house, name, sets=SETS)
        if anywhere:
            time.sleep(share * whole["took"])
        else:
            running.until_step(step)
            time.sleep(delay)
        hit, done = kill(running, victim)
        saving = being_written(running.folder)
        code, answer, said = running.end()
        if victim == "launcher" and code != 0:
            code, answer, said = Running(house, name, sets=SETS).end()
        assert code == 0, said[-3000:]
        same(house, name, whole, answer)
        lost = done - (answer["resumed_from"] or 0) if hit else 0
        # What is being written when the kill comes is lost with what came after it; a copy may just have been made.
        assert lost <= EVERY + (done - saving if saving is not None else 1), f"{lost} steps lost of {done}"
        shutil.rmtree(running.folder)
        return {"victim": victim if hit else "none, ended or not begun", "lost": max(0, lost)}

    campaign.run("kills", campaign.size(200, 2), case)


def test_a_training_killed_many_times_ends_as_if_nothing_had_been(house: House, whole: dict[str, Any]) -> None:
    """Every few steps another kill, until there were as many as were asked for; then it may go on to its end."""
    kills = campaign.size(50, 3)
    # A step at least is saved between two kills, or the run would never end.
    sets = (*SETS, "train.checkpoint.every_steps=1") if kills > STEPS // EVERY else SETS

    def case(number: int, rng: random.Random) -> campaign.Facts:
        name = f"soak-often-{number}"
        goals = [1 + at * (STEPS - 2) // kills + rng.randint(0, 1) for at in range(kills)]
        facts, (code, answer, said) = killed_at(house, name, sets, goals, rng)
        assert code == 0, said[-3000:]
        same(house, name, whole, answer)
        shutil.rmtree(house.root / name)
        return facts

    campaign.run("kills-in-one-run", 1, case)


def killed_at(
    house: House, name: str, sets: tuple[str, ...], goals: list[int], rng: random.Random
) -> tuple[campaign.Facts, tuple[int, dict[str, Any], str]]:
    """A training of which something is killed soon after each of some steps; how often that came off, and its end."""
    running, hits, launchers = Running(house, name, sets=sets), 0, 1
    for goal in goals:
        running.until_step(goal)
        time.sleep(rng.random() * 0.05)
        victim = rng.choice(VICTIMS)
        hit, _ = kill(running, victim)
        hits += hit
        if victim == "launcher":
            running.process.communicate()
            running, launchers = Running(house, name, sets=sets), launchers + 1
        elif hit:
            _until_others_run(running)
    return {"kills": hits, "launchers": launchers}, running.end()


def _until_others_run(running: Running) -> None:
    """Wait until the launcher has started ranks in the place of those that are there."""
    gone = {identity.pid for identity in running.ranks()}

    def others() -> bool:
        ranks = {identity.pid for identity in running.ranks()}
        return len(ranks) == 2 and not ranks & gone

    running.until(others)
