"""The reference pass of a training by preference is kept in parts: a kill loses one of them, a stop none."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import test_preference as preference
import torch
from conftest import House
from numpy.typing import NDArray
from torch import Tensor, distributed

from refit.errors import Preempted
from refit.packed import Packed
from refit.spec import Train
from refit.store import store_for
from trainer import reference
from trainer.inputs import train_split
from trainer.objective import Objective, load
from trainer.pairs import counts, to_pairs
from trainer.preference import log_probabilities
from trainer.reference import Asking, Reference

DPO = (
    "train.objective=dpo", "train.max_steps=1", "train.micro_batch=1", "train.accumulation=300", "train.warmup_steps=0",
)  # fmt: skip
EVERY = 0.0
"""Seconds of a part: one after each question."""


@pytest.fixture(scope="module")
def pairs(house: House) -> House:
    """The house with a dataset of pairs of these tests' own."""
    base = store_for(house.base).local(house.base)
    spec = preference.of_format(house, "preference")
    return replace(house, spec=spec, data=preference.commit(house.uri("reference-parts/data"), base))


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of this process only."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


class Model:
    """The base model, which remembers what it was asked, and ends where it is told to."""

    def __init__(self, pairs: House, end_after: int | None = None) -> None:
        train = Train.model_validate({"base": "cache://m/x", "objective": "dpo"})
        self.split: Packed = train_split(store_for(pairs.data).local(pairs.data), train)
        base = store_for(pairs.base).local(pairs.base)
        self._objective = Objective(load(base, dtype=torch.float32, attention="eager").eval(), bfloat16=False)
        self.asked: list[int] = []
        self.end_after = end_after

    @torch.no_grad()
    def say(self, packs: NDArray[np.int64]) -> Tensor:
        if len(self.asked) == self.end_after:
            raise KeyboardInterrupt("killed here")
        self.asked.append(int(packs[0]))
        return log_probabilities(
            self._objective, to_pairs(self.split.tokens[packs], self.split.segments[packs], self.split.mask[packs])
        )

    def ask(self, folder: Path, every: float = EVERY, stopping: Callable[[], float] = lambda: 0.0) -> Reference:
        packs = np.arange(15)
        self.asked.clear()

        def make() -> Reference:
            asking = Asking(folder, "x", self.split, packs, counts, at_once=2, part_seconds=every)
            return asking.all(self.say, stopping)

        return reference.kept(folder, "x", make)


GROUPS = [0, 2, 4, 6, 8, 10, 12, 14]
"""The first packs of what is asked at once; the last one is smaller."""


def names(folder: Path) -> set[str]:
    return {path.name.removeprefix("reference-") for path in folder.iterdir()}


@pytest.mark.usefixtures("alone")
def test_a_pass_that_is_killed_goes_on_after_its_last_part_to_the_same_bytes(pairs: House, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    model = Model(pairs)
    model.ask(whole, every=1e9)
    assert model.asked == GROUPS
    model.end_after = 5
    with pytest.raises(KeyboardInterrupt):
        model.ask(killed)
    model.end_after = None
    model.ask(killed)
    assert model.asked == GROUPS[5:]
    assert names(killed) == names(whole) == {"x.json", "x.safetensors"}, "the parts are gone"
    for name in names(whole):
        assert (killed / f"reference-{name}").read_bytes() == (whole / f"reference-{name}").read_bytes()
    model.ask(killed)
    assert model.asked == []


@pytest.mark.usefixtures("alone")
def test_a_part_that_was_damaged_is_asked_again_and_no_other(pairs: House, tmp_path: Path) -> None:
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    model = Model(pairs)
    expected = model.ask(whole)
    model.end_after = 6
    with pytest.raises(KeyboardInterrupt):
        model.ask(torn)
    damaged = torn / "reference-x.2.safetensors"  # the third group
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x7f")
    (torn / "reference-x.4.json").unlink()  # a kill between the two files
    model.end_after = None
    found = model.ask(torn)
    assert model.asked == [4, 8, 12, 14]
    assert found.values.tobytes() == expected.values.tobytes()


@pytest.mark.usefixtures("alone")
def test_a_stop_is_heeded_between_two_questions_and_loses_none(pairs: House, tmp_path: Path) -> None:
    model = Model(pairs)
    expected = model.ask(tmp_path / "whole")
    stopped = tmp_path / "stopped"
    for _ in range(2):  # every two hours, say: it is done in the end
        with pytest.raises(Preempted, match=r"told to stop while the reference is asked; \d+ of 8 .* left to ask"):
            model.ask(stopped, every=1e9, stopping=lambda: float(len(model.asked) == 3))
        assert len(model.asked) == 3
    assert model.ask(stopped, every=1e9).values.tobytes() == expected.values.tobytes()
    assert model.asked == GROUPS[6:]


@pytest.mark.usefixtures("alone")
def test_parts_of_another_reference_are_not_taken(pairs: House, tmp_path: Path) -> None:
    """Their name follows from training, split, arithmetic and packs, as that of the whole does."""
    told = {"split": "train", "dtype": "float32", "packs": np.arange(15)}
    named = {
        reference.name_of("t", **told),
        reference.name_of("u", **told),
        reference.name_of("t", **told | {"dtype": "bfloat16"}),
        reference.name_of("t", **told | {"split": "validation"}),
        reference.name_of("t", **told | {"packs": np.arange(14)}),
    }
    assert len(named) == 5
    model = Model(pairs, end_after=3)
    with pytest.raises(KeyboardInterrupt):
        model.ask(tmp_path)
    for path in list(tmp_path.glob("reference-x.*")):
        path.rename(path.with_name(path.name.replace("-x.", "-y.")))
    model.end_after = None
    model.ask(tmp_path)
    assert model.asked == GROUPS
    assert {name for name in names(tmp_path) if name.startswith("y.")}, "nor are they removed"


@pytest.mark.integration
@pytest.mark.usefixtures("alone")
def test_a_training_that_is_told_to_stop_in_its_reference_pass_is_preempted_and_goes_on(
    house: House, pairs: House, tmp_path: Path
) -> None:
    """On two ranks at first and on one afterwards; what is known in the end is what one process is told at once."""
    base = store_for(house.base).local(house.base)
    many = replace(pairs, data=preference.commit(house.uri("reference-parts/many"), base, times=15))
    uri, folder = house.uri("reference-parts/stopped"), house.root / "reference-parts" / "stopped"
    assert stopped(many.argv("run", "--output", uri, "--ranks", "2", sets=DPO), folder) == Preempted.exit_code
    assert list(folder.glob("reference-*.*.safetensors")), "a part"
    assert "while the reference is asked" in (folder / "events.jsonl").read_text()
    code, _, said = many.run("run", "--output", uri, "--ranks", "1", sets=DPO)
    assert code == 0, said
    first, last = told(folder)
    assert first == 0 < last < 300
    (path,) = folder.glob("reference-*.safetensors")
    found = reference.read(folder, path.stem.removeprefix("reference-"))
    assert found is not None
    model = Model(many)  # another process: its kernels may add up in another order
    expected = Asking(tmp_path, "x", model.split, found.packs, counts, at_once=1).all(model.say, lambda: 0.0)
    assert len(model.asked) == 300
    np.testing.assert_allclose(found.values, expected.values, rtol=1e-5, atol=1e-6)


def stopped(argv: list[str], folder: Path) -> int:
    """Start a training and tell it to stop in its reference pass; its exit code."""
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not asks(folder):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        return process.wait(120)
    finally:
        process.kill()


def asks(folder: Path) -> bool:
    return bool(told(folder))


def told(folder: Path) -> list[int]:
    """How much of the reference each launch knew from the start."""
    log = folder / "ranks" / "rank-0.log"
    text = log.read_text() if log.is_file() else ""
    return [int(number) for number in re.findall(r"\breference\b.*\bknown=(\d+) of=300\n", text)]
