"""A campaign of kills at random moments: seeded, resumable, as long as one likes (`make soak COUNT=200 SEED=1`).

`make test` runs the first few. Case n of a seed is the same on any machine but for the machine's speed: a victim, and a
moment as a share of the undisturbed run. What has passed is kept in `soak-kills-<seed>.jsonl`, and not done again.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
from conftest import House
from test_kills import Running, undisturbed  # noqa: F401  (a fixture)

from refit import files

pytestmark = pytest.mark.integration

SEED = int(os.environ.get("REFIT_SOAK_SEED", "1"))
COUNT = int(os.environ.get("REFIT_SOAK_COUNT", "2"))
KEPT = os.environ.get("REFIT_SOAK_FOLDER")


def passed() -> set[int]:
    file = Path(KEPT or "/nowhere") / f"soak-kills-{SEED}.jsonl"
    return {int(json.loads(line)["case"]) for line in file.read_text().splitlines()} if file.is_file() else set()


@pytest.mark.parametrize("case", range(COUNT))
def test_a_training_killed_at_any_moment_ends_as_if_nothing_had_been(
    house: House,
    undisturbed: dict,  # noqa: F811
    case: int,
) -> None:
    if case in passed():
        pytest.skip("has passed before")
    rng = random.Random(f"{SEED}-{case}")
    victim, step, delay = rng.choice(("launcher", "rank 0", "rank 1")), rng.randint(1, 38), rng.random() * 0.5
    name = f"soak-{SEED}-{case}"
    running = Running(house, name)
    running.until_step(step)
    time.sleep(delay)
    if running.process.poll() is None:
        try:
            target = running.process.pid if victim == "launcher" else running.rank(int(victim[-1]))
            os.kill(target, signal.SIGKILL)
        except (AssertionError, ProcessLookupError):
            pass  # it had ended by then: nothing to kill, and nothing may differ
    code, answer, said = running.end()
    if victim == "launcher" and code != 0:
        code, answer, said = Running(house, name).end()
    assert code == 0, said
    assert answer["model_digest"] == undisturbed["model_digest"]
    assert losses(house, name) == losses(house, "undisturbed")
    if KEPT:
        record = {"case": case, "victim": victim, "step": step, "resumed_from": answer["resumed_from"]}
        files.append(Path(KEPT) / f"soak-kills-{SEED}.jsonl", json.dumps(record).encode())


def losses(house: House, name: str) -> list[tuple[int, float]]:
    lines = (house.root / name / "metrics.jsonl").read_text().splitlines()
    return [(record["step"], record["loss"]) for record in map(json.loads, lines)]
