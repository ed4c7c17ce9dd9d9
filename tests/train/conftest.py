"""The training stage's tests run where torch is: `.venv-compute/bin/python -m pytest tests/train`.

`make test` calls them there. In the control venv only what needs hypothesis or moto is collected, which are only there:
none of it needs torch.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    here = Path(__file__).parent
    driven = {"checkpoint_stores", "metrics", "recipes", "soak_states", "zombies"}
    collect_ignore = [path.name for path in here.glob("test_*.py") if path.stem.removeprefix("test_") not in driven]
    sys.path.append(str(here.parents[1] / "images" / "train"))  # the trainer is not installed there

sys.path.insert(0, str(Path(__file__).parent))  # for tickets.py: tests are imported by path, not as a package

SPEC = """
name: tickets
title: Tickets
team: support
owner: support@example.com
data: {{sources: [{{name: mail, uri: "file:///nowhere/mail.jsonl"}}], pack_length: 128}}
train:
  base: "{base}"
  method: full
  max_steps: 12
  learning_rate: 3.0e-3
  warmup_steps: 4
  micro_batch: 2
  accumulation: 2
  checkpoint: {{every_steps: 4}}
"""


@dataclass(frozen=True)
class House:
    """A store with a base model and a dataset, and the trainer as a person calls it."""

    root: Path
    spec: Path
    base: str
    data: str

    def argv(self, command: str, *arguments: str, sets: tuple[str, ...] = ()) -> list[str]:
        """A trainer's command line."""
        extra = [part for item in sets for part in ("--set", item)]
        return [sys.executable, "-m", "trainer", command, str(self.spec), "--data", self.data, *arguments, *extra]

    def run(self, command: str, *arguments: str, sets: tuple[str, ...] = ()) -> tuple[int, dict[str, Any], str]:
        """Exit code, the answer (the last line of stdout), and stderr."""
        return call(self.argv(command, *arguments, sets=sets))

    def train(self, output: str, *, ranks: int = 1, sets: tuple[str, ...] = ()) -> dict[str, Any]:
        """Train to the end below the root; the answer."""
        code, answer, said = self.run("run", "--output", self.uri(output), "--ranks", str(ranks), sets=sets)
        assert code == 0, said
        return answer

    def uri(self, name: str) -> str:
        """The address of a folder below the root."""
        return (self.root / name).as_uri()

    def metrics(self, output: str) -> list[dict[str, Any]]:
        """The steps of a training."""
        return [json.loads(line) for line in (self.root / output / "metrics.jsonl").read_text().splitlines()]

    def losses(self, output: str) -> list[tuple[int, float, float]]:
        """Step, loss and gradient norm of every record."""
        return [(record["step"], record["loss"], record["grad_norm"]) for record in self.metrics(output)]

    def back_to(self, output: str, step: int) -> None:
        """As a kill after the checkpoint of that step leaves a training."""
        folder = self.root / output
        (folder / "manifest.json").unlink()
        for path in (folder / "checkpoints").glob("step-*"):
            if int(path.name.partition("-")[2]) > step:
                shutil.rmtree(path)


def call(argv: list[str]) -> tuple[int, dict[str, Any], str]:
    """Run a program of ours."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("REFIT_STORE", None)
    done = subprocess.run(argv, capture_output=True, text=True, timeout=900, env=environment, check=False)
    last = done.stdout.strip().splitlines()[-1:] or ["{}"]
    return done.returncode, json.loads(last[0]), done.stderr


@pytest.fixture(scope="session")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    """One seed model and one dataset for all tests; every test writes to a folder of its own."""
    import tickets

    from refit.store import store_for
    from trainer.seed import seed

    root = tmp_path_factory.mktemp("house")
    base = (root / "models" / "seed").as_uri()
    seed(base, [tickets.corpus(root / "corpus.jsonl")])
    data = tickets.dataset((root / "dataset").as_uri(), store_for(base).local(base))
    spec = root / "tickets.yaml"
    spec.write_text(SPEC.format(base=base), encoding="utf-8")
    return House(root, spec, base, data)


@pytest.fixture(scope="session")
def trained(house: House) -> dict[str, Any]:
    """One training on one rank, to its end, in the folder `alone`."""
    return house.train("alone")
