"""A step that is not finite moves nobody's weights: it ends the training, or is passed over within a budget."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import faults
import numpy as np
import pytest
from conftest import House
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import distributed

from refit.errors import Infrastructure
from refit.fingerprint import RECIPE_VERSION, fingerprint, training_fingerprint
from refit.spec import Skip, Train
from trainer import scene
from trainer.agreement import Agreed, Agreement
from trainer.skips import Skips

BUDGET = (
    "train.max_restarts=0",
    "train.skip.budget=2",
    "train.max_steps=6",
    "train.checkpoint.every_steps=1",
    "train.checkpoint.keep_last=9",
)


def faulty(house: House, arguments: list[str], wrong: list[tuple[int, int, str]]) -> subprocess.CompletedProcess[str]:
    """Call the trainer with faults in its ranks: (rank, step, what)."""
    told = json.dumps([{"rank": rank, "step": step, "what": what} for rank, step, what in wrong])
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", faults.FAULTS: told, f"{faults.FAULTS}_FOLDER": str(house.root)
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, faults.__file__, *arguments], capture_output=True, text=True, timeout=600, env=environment,
        check=False,
    )  # fmt: skip


def train(house: House, output: str, wrong: list[tuple[int, int, str]], *sets: str) -> tuple[int, str]:
    """Train on two ranks with faults. Exit code and what was said."""
    argv = house.argv("run", "--output", house.uri(output), "--ranks", "2", sets=(*BUDGET, *sets))
    done = faulty(house, argv[3:], wrong)
    return done.returncode, done.stdout + done.stderr


def replay(house: House, output: str, step: int, wrong: list[tuple[int, int, str]]) -> dict[str, Any]:
    """Take a skipped step again, with faults; the answer."""
    done = faulty(house, ["replay", house.uri(output), "--step", str(step)], wrong)
    assert done.returncode == 0, done.stdout + done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def finish(house: House, output: str, wrong: list[tuple[int, int, str]], *sets: str) -> None:
    code, said = train(house, output, wrong, *sets)
    assert code == 0, said


def state(house: House, output: str, step: int) -> dict[str, Any]:
    """All ranks' tensors of weights and optimizer in a checkpoint."""
    folder: Path = house.root / output / "checkpoints" / f"step-{step}"
    return {
        f"{path.name}/{name}": tensor.numpy()
        for path in sorted(folder.glob("state-rank-*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def events(house: House, output: str, name: str) -> list[dict[str, Any]]:
    return [event for event in _all_events(house, output) if name in event]


def _all_events(house: House, output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (house.root / output / "events.jsonl").read_text().splitlines()]


def test_a_budget_is_for_all_steps_and_for_a_row() -> None:
    skips = Skips(Skip(budget=4, in_a_row=2))
    assert [skips.spend(step) for step in (1, 2, 3)] == [True, True, False], "the third in a row"
    assert skips.steps == [1, 2]
    resumed = Skips(Skip(budget=4, in_a_row=2), skips.steps)
    assert [resumed.spend(step) for step in (3, 5, 7, 9)] == [False, True, True, False]
    assert not Skips(Skip()).spend(1), "by default nothing is skipped"


def test_a_step_that_is_offloaded_cannot_be_passed_over() -> None:
    """DeepSpeed keeps its gradients on the host by then, and would take the step all the same."""
    with pytest.raises(ValidationError, match=r"train\.skip\.budget is 1 and train\.offload is optimizer"):
        Train(base="cache://models/x", zero_stage=2, offload="optimizer", gpus_per_node=1, skip={"budget": 1})


def test_a_training_that_skips_nothing_keeps_its_name() -> None:
    def name(**more: Any) -> str:
        return training_fingerprint(Train(base="cache://models/x", **more), dataset="d", base="b")

    train = Train(base="cache://models/x")
    before = train.model_dump(mode="json", exclude={*Train.not_in_fingerprint, *Train.came_later})
    assert (
        name() == name(skip={}) == fingerprint("train", RECIPE_VERSION["train"], before, {"dataset": "d", "base": "b"})
    )
    assert len({name(), name(skip={"budget": 1}), name(skip={"budget": 2})}) == 3


@pytest.mark.integration
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_that_is_not_finite_leaves_no_trace_but_its_scene(house: House, stage: int) -> None:
    """DeepSpeed skips by itself above stage 0, when the gradient is not finite; a loss may be infinite without that."""
    name, sets = f"skips-{stage}", (f"train.zero_stage={stage}", "train.accumulation=4")
    finish(house, name, [(1, 1, "loss"), (0, 4, "gradient")], *sets)
    finish(house, f"{name}-mirrored", [(0, 1, "gradient"), (1, 4, "loss")], *sets)
    assert same(state(house, name, 3), state(house, name, 4)), "weights, moments"
    assert same(state(house, name, 6), state(house, f"{name}-mirrored", 6)), "nothing of the gradient leaks"
    assert not same(state(house, name, 4), state(house, name, 5))
    records = house.metrics(name)
    assert [record.get("skipped", False) for record in records] == [True, False, False, True, False, False]
    assert records[0]["loss"] is None
    assert [event["skipped"]["step"] for event in events(house, name, "skipped")] == [1, 4]
    kept = json.loads((house.root / name / "scenes/step-4.json").read_text())
    assert kept["packs"] == np.load(house.root / name / "scenes/step-4.npz")["packs"].tolist()
    assert set(kept["gradient_norms"].values()) == {"nan"}
    assert len(kept["gradient_norms"]) > 1, "by layer"


@pytest.mark.integration
@pytest.mark.parametrize("stage", [0, 3])
def test_a_resume_over_a_skipped_step_is_exact_and_remembers_it(house: House, stage: int) -> None:
    """Above stage 0 only what the stage keeps in its own way: a state of which no step was taken yet.

    What was spent is in the manifest, and a replay goes on as a resume does: the same at any stage.
    """
    name, wrong = f"skips-resumed-{stage}", [(1, 1, "loss"), (1, 3, "gradient")]
    sets = (f"train.zero_stage={stage}",)
    finish(house, name, wrong, *sets)
    for kept in (1, 4) if stage == 0 else (1,):  # before the first step that was taken, after the second that was not
        output = house.root / f"{name}-from-{kept}"
        shutil.copytree(house.root / name, output)
        (output / "manifest.json").unlink()
        for step in range(kept + 1, 7):
            shutil.rmtree(output / f"checkpoints/step-{step}")
        finish(house, output.name, wrong, *sets)
        assert house.losses(output.name) == house.losses(name)
        assert same(state(house, output.name, 6), state(house, name, 6))
        assert house.metrics(output.name)[2]["skips"] == 2
    if stage > 0:
        return
    again = replay(house, name, 3, wrong)
    assert (again["replayed"], again["exact"], again["why"]) == (True, True, house.metrics(name)[2]["why"])
    innocent = replay(house, name, 3, wrong[:1])
    assert (innocent["replayed"], innocent["exact"]) == (False, True)
    (house.root / f"{name}-from-4/manifest.json").unlink()
    for step in (5, 6):
        shutil.rmtree(house.root / f"{name}-from-4/checkpoints/step-{step}")
    code, said = train(house, f"{name}-from-4", [*wrong, (0, 5, "loss")], *sets)
    assert code == 12
    assert "2 steps were skipped before it; train.skip allows 2 in all" in said


@pytest.mark.integration
def test_without_a_budget_the_first_step_that_is_not_finite_ends_the_training(house: House) -> None:
    code, said = train(house, "skips-none", [(1, 3, "loss")], "train.skip.budget=0")
    assert code == 12
    assert "the last checkpoint is of step 2" in said
    assert not (house.root / "skips-none/scenes").exists()
    assert (house.root / "skips-none/scene.json").is_file()


@pytest.mark.integration
def test_a_collective_that_a_rank_enters_alone_costs_a_launch_and_changes_nothing(house: House) -> None:
    """Collectives that do not match hang, or put another's numbers into the sum."""
    name, sets = "alone-in-it", ("train.zero_stage=2", "train.max_restarts=1", "train.hang_seconds=5")
    finish(house, f"{name}-undisturbed", [], *sets)
    finish(house, name, [(1, 4, "collective")], *sets)
    assert (house.root / name / "once-collective").exists()
    assert house.losses(name) == house.losses(f"{name}-undisturbed")
    assert same(state(house, name, 6), state(house, f"{name}-undisturbed", 6))
    retried = [event["reason"] for event in _all_events(house, name) if event["state"] == "retrying"]
    assert len(retried) == 1


@pytest.mark.integration
def test_where_every_thread_of_a_hung_rank_stood_is_in_its_log(house: House) -> None:
    name, sets = "hangs-once", ("train.max_restarts=1", "train.hang_seconds=5")
    finish(house, name, [(1, 4, "hang")], *sets)
    (retried,) = [event["reason"] for event in _all_events(house, name) if event["state"] == "retrying"]
    log = house.root / name / "ranks" / "rank-1.log"
    assert str(log) in retried
    dumped = log.read_text().partition("most recent call first")[2]
    assert "faults.py" in dumped
    assert "loop.py" in dumped
    assert "most recent call first" in (house.root / name / "ranks" / "rank-0.log").read_text(), "who waited says where"


@pytest.mark.integration
def test_a_stop_in_a_look_is_heeded_and_the_look_is_taken_after_the_resume(house: House) -> None:
    """A look may take longer than a grace period has seconds."""
    name, sets = "stopped-in-a-look", ("train.validation.every_steps=2", "train.validation.publish=best")
    finish(house, f"{name}-undisturbed", [], *sets)
    code, said = train(house, name, [(1, 4, "stop")], *sets)
    assert code == 20, said
    assert "step 4 is in a checkpoint" in said
    assert [record.get("validation_loss") is not None for record in house.metrics(name)] == [False, True, False, False]
    finish(house, name, [(1, 4, "stop")], *sets)
    looks = [[record.get("validation_loss") for record in house.metrics(one)] for one in (name, f"{name}-undisturbed")]
    assert looks[0] == looks[1]
    assert house.losses(name) == house.losses(f"{name}-undisturbed")
    manifests = [json.loads((house.root / one / "manifest.json").read_text()) for one in (name, f"{name}-undisturbed")]
    assert manifests[0]["facts"]["best"] == manifests[1]["facts"]["best"]


def test_the_ranks_are_told_when_they_are_not_at_the_same_step(tmp_path: Path) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        made = Agreement(3, 1.5, counts=True, stop=False, seconds=0.25, saving=[1.0], told={"x": 2.0})
        assert made.heard() == Agreed(nll=1.5, finite=True, stop=False, seconds=0.25, saving=[1.0], told={"x": 2.0})
        made._votes[0] = 4
        with pytest.raises(Infrastructure, match="not all at step 4"):
            made.heard()
    finally:
        distributed.destroy_process_group()


def test_the_newest_scenes_of_skipped_steps_are_kept(tmp_path: Path) -> None:
    from types import SimpleNamespace

    split: Any = SimpleNamespace(**dict.fromkeys(("tokens", "segments", "mask"), np.zeros((2, 4))))
    for step in range(1, scene.KEPT + 4):
        scene.keep_skipped(tmp_path, {"step": step, "why": "", "checkpoint": None}, [1], split, [{}])
    kept = {int(path.stem.removeprefix("step-")) for path in (tmp_path / "scenes").iterdir()}
    assert kept == set(range(4, scene.KEPT + 4))
