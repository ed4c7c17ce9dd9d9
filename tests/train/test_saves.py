"""Saves that are written behind the training: what is in them, what is left where one fails, what is kept."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import House, call
from safetensors.torch import load_file
from test_kills import STEPS, Running
from torch import distributed

from refit import files
from refit.errors import BadInput, Diverged, Infrastructure, Preempted
from refit.fingerprint import recipe_digest
from refit.job import Job
from refit.manifest import Manifest
from refit.pipeline import load
from refit.store import store_for
from trainer import checkpoints, grace, snapshot, work, writer
from trainer.batches import Loader
from trainer.engine import Engine, connect
from trainer.flight import Flight
from trainer.inputs import locate, train_split
from trainer.loop import Loop
from trainer.objective import build
from trainer.saver import Saver
from trainer.task import Task, Wire, heard
from trainer.validation import Best, Look, Validator

FACTS = partial(dict, dtype="float32", best=None)
SOLO = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
    "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo",
}  # fmt: skip


class Held(Saver):
    """A saver whose threads wait at a gate, as on a slow disk, before they write."""

    gate = threading.Event()

    def _work(self, flight: Flight) -> None:
        self.gate.wait()
        super()._work(flight)


class Training:
    """A training in this process, of one rank as a rule: the real engine, loop, saver and store."""

    def __init__(self, house: House, name: str, *sets: str, told: Any = lambda: 0.0) -> None:
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        spec = load(house.spec, ("train.checkpoint.every_steps=1000", *sets))
        self.output, self.folder = house.uri(name), house.root / name
        job = Job.build(
            "train", spec, store=house.root.as_uri(), output=self.output,
            inputs={"dataset": house.data, "base": house.base},
        )  # fmt: skip
        inputs = locate(job)
        (self.folder / "ranks").mkdir(parents=True, exist_ok=True)
        store_for(self.output).write(f"{self.output}/{writer.TOKEN}", b'{"token": "ours"}')
        self._said = self.folder / "said.jsonl"
        wire = Wire(os.open(self._said, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
        self.task = Task(
            mode="train", job=job, fingerprint=inputs.fingerprint, dataset=inputs.dataset, base=inputs.base,
            folder=self.folder, dtype="float32", token="ours", ranks=ranks,
            rendezvous=self.folder / "ranks" / "rendezvous", data=inputs.data,
        )  # fmt: skip
        loader = Loader(train_split(inputs.dataset, spec.train), spec.train, rank=rank, ranks=ranks)
        torch.manual_seed(1)
        objective = build(self.task.base, spec.train, dtype="float32", length=loader.length)
        self.engine = Engine(objective, spec.train)
        self.validator = work._validator(self.engine, self.task, loader, wire)
        self.loop = Loop(self.engine, loader, self.task, wire, told, self.validator)
        self.saver = self.loop._saver

    def said(self, kind: str) -> list[dict[str, Any]]:
        """What it told its launcher of a kind."""
        return [line for line in map(heard, self._said.read_bytes().splitlines()) if line["kind"] == kind]

    def state(self, step: int) -> dict[str, torch.Tensor]:
        """What is in a checkpoint, whose files must match their hashes."""
        found = checkpoints.verify(checkpoints.address(self.output, step))
        held = load_file(store_for(found.uri).local(found.uri) / "state-rank-0.safetensors")
        return {name: tensor.clone() for name, tensor in held.items()}  # not the file's own pages

    def steps(self) -> list[int]:
        """The checkpoints that are there, newest first."""
        return [one.step for one in checkpoints.committed(self.output)]

    def drafts(self) -> list[Path]:
        """What a save left half-written."""
        return list((self.folder / "checkpoints").glob(".*"))


@pytest.fixture(scope="module")
def solo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """This process as the one rank there is."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SOLO.items():
            patch.setenv(name, value)
        connect(tmp_path_factory.mktemp("solo") / "rendezvous", 0, 1)
        yield
        distributed.destroy_process_group()


@pytest.fixture
def small_disk(house: House, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Gives the folder of a training's checkpoints a disk of so many bytes; again for another size."""
    mounted: list[Path] = []

    def mount(name: str, size: int) -> None:
        place = house.root / name / "checkpoints"
        place.mkdir(parents=True, exist_ok=True)
        options = f"{'remount,' if place in mounted else ''}size={size}"
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            pytest.skip(f"no small disk can be mounted here: {done.stderr.strip()}")
        if place not in mounted:
            mounted.append(place)

    yield mount
    for place in mounted:
        subprocess.run(["umount", str(place)], check=True)


def test_saves_behind_hold_what_saves_that_are_waited_for_hold(solo: None, house: House) -> None:
    """slime#1547 and others: saves behind that all hold the first weights, or those of a later step."""
    waited = Training(house, "saves-waited")
    behind = Training(house, "saves-behind")
    behind.saver.__class__ = Held
    for number in range(4):
        waited.loop.step(number)
        behind.loop.step(number)
        if number in (0, 2):
            waited.loop.save(number + 1)
            behind.saver.finish()  # of the save before, which was let go
            Held.gate.clear()
            behind.saver.after(number + 1, FACTS, must=True)
        else:
            assert number not in behind.steps(), "the training is a step ahead of what is written"
            Held.gate.set()
    behind.saver.finish()
    for step in (1, 3):
        expected, got = waited.state(step), behind.state(step)
        assert expected.keys() == got.keys()
        assert all(torch.equal(expected[name], got[name]) for name in expected)
    assert not torch.equal(*(next(iter(behind.state(step).values())) for step in (1, 3)))


def test_saves_by_steps_are_of_just_those_steps_however_fast_they_come(solo: None, house: House) -> None:
    training = Training(house, "saves-exact", "train.checkpoint.every_steps=2")
    training.loop.run(0, 7)
    assert [told["step"] for told in training.said("saved")] == [2, 4, 6, 7]


def test_a_save_that_comes_due_by_the_clock_during_another_is_put_off_to_the_step_after_it(
    solo: None, house: House
) -> None:
    training = Training(house, "saves-put-off", "train.checkpoint.every_minutes=0.0000001")
    training.saver.__class__ = Held
    Held.gate.clear()
    for number in range(3):
        training.loop.step(number)
        training.saver.after(number + 1, FACTS)
    Held.gate.set()
    training.saver.finish()
    training.loop.step(3)
    training.saver.after(4, FACTS)
    training.saver.finish()
    assert training.steps() == [4, 1]


def test_a_disk_that_is_full_at_the_first_save_is_told_and_saving_goes_on_once_there_is_room(
    solo: None, house: House, small_disk: Any
) -> None:
    """A trainer that dies of a full disk, or goes on for days without a checkpoint and without a word."""
    small_disk("saves-full", 64 << 10)
    training = Training(house, "saves-full")
    training.loop.step(0)
    training.saver.after(1, FACTS, must=True)
    training.saver.finish()
    (told,) = training.said("save_failed")
    assert "No space left on device" in told["why"]
    assert "lower train.checkpoint.keep_last" in told["why"]
    assert told["free"] < told["needed"]
    assert (training.steps(), training.drafts()) == ([], [])
    with pytest.raises(Infrastructure, match="step 1 could not be written: rank 0: No space left"):
        training.loop.save(1)
    small_disk("saves-full", 64 << 20)
    training.loop.save(1)
    assert training.steps() == [1]


def test_saves_that_go_on_failing_end_the_training(solo: None, house: House, small_disk: Any) -> None:
    small_disk("saves-failing", 64 << 10)
    training = Training(house, "saves-failing", "train.checkpoint.every_steps=1", "train.checkpoint.max_failures=2")
    with pytest.raises(Infrastructure, match=r"2 saves in a row have failed.*No space left"):
        training.loop.run(0, 12)


def test_older_checkpoints_make_room_and_never_the_last_good_one_or_the_best(
    solo: None, house: House, small_disk: Any
) -> None:
    training = Training(house, "saves-room")
    small_disk("saves-room", 1 << 30)
    training.loop.step(0)
    for step in (1, 2):
        training.loop.save(step)
    size = snapshot.size(training.output, 1)
    small_disk("saves-room", size * 5 // 2 + (1 << 20))
    training.loop.save(3)
    assert training.steps() == [3, 2], "the oldest made room"
    training.saver.after(4, partial(FACTS, best={"step": 2, "loss": 1.0}), must=True)
    training.saver.finish()
    assert training.steps() == [3, 2], "one is the best and one the last"
    assert training.said("save_failed")[0]["step"] == 4


def test_a_write_that_the_system_cuts_short_leaves_nothing_that_counts(solo: None, house: House) -> None:
    training = Training(house, "saves-cut")
    training.loop.step(0)
    training.loop.save(1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (256 << 10, before[1]))
    try:
        training.saver.after(2, FACTS, must=True)
        training.saver.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "File too large" in training.said("save_failed")[0]["why"]
    assert (training.steps(), training.drafts()) == ([1], [])
    training.loop.save(2)
    assert training.steps() == [2, 1]


def test_who_was_taken_over_meanwhile_commits_nothing(solo: None, house: House) -> None:
    training = Training(house, "saves-zombie")
    training.saver.__class__ = Held
    Held.gate.clear()
    training.loop.step(0)
    training.saver.after(1, FACTS, must=True)
    store_for(training.output).write(f"{training.output}/{writer.TOKEN}", b'{"token": "theirs"}')
    Held.gate.set()
    with pytest.raises(Infrastructure, match="another trainer has taken over"):
        training.saver.finish()
    assert (training.steps(), training.drafts()) == ([], [])


def test_the_weights_that_zero_3_shares_out_are_whole_where_they_are_exported(solo: None, house: House) -> None:
    """Adapters of so large a rank that they are shared out: small parameters DeepSpeed keeps whole."""
    sets = ("train.method=lora", "train.lora.rank=1024", "train.zero_stage=3")
    training = Training(house, "saves-whole", *sets)
    module = training.engine._engine.module
    assert [name for name, weight in module.named_parameters() if weight.numel() == 0], "some are apart"
    with training.engine.whole() as objective:
        adapter = {name: weight for name, weight in objective.named_parameters() if weight.requires_grad}
        assert all(weight.ndim == 2 and weight.numel() > 0 for weight in adapter.values())
        assert all(weight.abs().max() > 0 for name, weight in adapter.items() if "lora_A" in name)
    training.engine.close()


def test_a_step_that_is_not_finite_is_never_saved_and_evicts_nothing(solo: None, house: House) -> None:
    """NaN checkpoints that push the last good one out (diffusion-pipe#159 and others)."""
    training = Training(house, "saves-nan", "train.checkpoint.every_steps=1", "train.checkpoint.keep_last=1")
    training.loop.step(0)
    training.saver.after(1, FACTS)
    with torch.no_grad(), training.engine.whole() as objective:
        next(objective.parameters()).fill_(float("nan"))
    with pytest.raises(Diverged, match="the last checkpoint is of step 1"):
        training.loop.run(1, 12)
    assert training.steps() == [1]
    assert all(torch.isfinite(tensor).all() for tensor in training.state(1).values())


def test_told_to_stop_without_time_for_a_save_it_ends_what_is_in_flight_and_begins_none(
    solo: None, house: House
) -> None:
    """A slow save cut at the end of the grace period: nothing is gained, and the one in flight is lost too."""
    sets = ("train.checkpoint.every_steps=2", "train.checkpoint.grace_seconds=60")
    steps = 0
    training = Training(house, "saves-grace", *sets, told=lambda: 59.0 if steps >= 3 else 0.0)
    training.saver._durations.add(30.0)
    look = training.loop._look

    def count(step: int, until: int, record: dict[str, Any]) -> bool:
        nonlocal steps
        steps = step
        return look(step, until, record)

    training.loop._look = count  # type: ignore[method-assign]
    with pytest.raises(Preempted, match=r"no time left.*the last checkpoint is of step 2"):
        training.loop.run(0, 12)
    assert training.steps() == [2]
    assert training.said("save_skipped")[0]["save_seconds"] == 30


def test_whether_a_save_fits_counts_the_slowest_and_the_rest_of_the_one_in_flight() -> None:
    durations = grace.Durations()
    assert durations.fits(1, None), "nothing is known yet: it is tried"
    durations.add(10)
    durations.add(4)
    assert (durations.fits(10, None), durations.fits(9, None)) == (True, False)
    assert (durations.fits(17, 3), durations.fits(16, 3), durations.fits(10, 30)) == (True, False, True)


def test_fast_checkpoints_hold_the_weights_alone_and_nothing_is_resumed_from_them(solo: None, house: House) -> None:
    training = Training(house, "saves-fast", "train.checkpoint.fast_every_steps=1", "train.checkpoint.keep_fast=2")
    for number in range(3):
        training.loop.step(number)
        training.saver.after(number + 1, FACTS)
        training.saver.finish()
    found = list(checkpoints.committed(training.output, checkpoints.FAST))
    assert [one.step for one in found] == [3, 2]
    assert checkpoints.newest(training.output, training.task.fingerprint) is None
    training.loop.save(3)
    whole = training.state(3)
    weights = load_file(store_for(found[0].uri).local(found[0].uri) / "state-rank-0.safetensors")
    assert weights.keys() == {name for name in whole if name.endswith("/weight")}
    assert all(torch.equal(weights[name], whole[name]) for name in weights)
    with pytest.raises(BadInput, match="holds weights only"):
        snapshot.load(training.engine, training.task, found[0].uri)


def test_a_checkpoint_says_where_in_the_data_it_is_and_one_that_does_not_is_gone_on_from(
    solo: None, house: House
) -> None:
    """Older trainers wrote neither position nor the recipe's digest."""
    training = Training(house, "saves-position")
    training.loop.step(0)
    training.loop.save(1)
    (found,) = checkpoints.committed(training.output)
    train, split = training.task.train, train_split(training.task.dataset, training.task.train)
    dataset = store_for(house.data).require(house.data, "dataset")
    told = found.manifest.facts["data"]
    assert (told["packs_seen"], told["packs"]) == (train.micro_batch * train.accumulation, split.header.packs)
    assert (told["fingerprint"], told["content"]) == (dataset.fingerprint, dataset.content_digest())
    assert found.manifest.facts["recipe"] == recipe_digest(train)

    place = store_for(found.uri).local(found.uri) / "manifest.json"
    older = json.loads(place.read_text())
    del older["facts"]["data"], older["facts"]["recipe"], older["seal"]
    place.write_text(json.dumps(older))
    again = checkpoints.newest(training.output, training.task.fingerprint)
    assert again is not None
    assert "data" not in again.manifest.facts
    before = training.state(1)
    training.loop.step(1)
    snapshot.load(training.engine, training.task, again.uri)
    after = training.engine.state().tensors
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def fake(output: str, step: int, kind: str = checkpoints.KIND) -> Path:
    """A checkpoint with one file."""
    uri = checkpoints.address(output, step, kind)
    with store_for(uri).publish(uri) as draft:
        (draft.path / "weights").write_bytes(bytes([step]) * 1000)
        draft.commit(Manifest(kind=kind, fingerprint="f" * 32, facts={"step": step}))
    return store_for(uri).local(uri) / "weights"


def test_after_a_power_loss_zeroed_the_two_newest_the_third_is_used_and_what_follows_is_kept(tmp_path: Path) -> None:
    """Kept by number alone, damaged checkpoints of a lost future push out each new one as it is written."""
    output = tmp_path.as_uri()
    for step in (10, 20, 30):
        file = fake(output, step)
        if step > 10:
            file.write_bytes(bytes(1000))
    found = checkpoints.newest(output, "f" * 32)
    assert found is not None
    assert found.step == 10
    assert not list((tmp_path / "checkpoints").glob("latest*")), "no pointer that could name what is not there"
    fake(output, 15)
    checkpoints.retain(output, 2, written=15)
    assert [one.step for one in checkpoints.committed(output)] == [15, 10]


def test_retention_keeps_the_best_and_the_newest_that_matches_its_hashes(tmp_path: Path) -> None:
    output = tmp_path.as_uri()
    files = {step: fake(output, step) for step in (10, 20, 30, 40)}
    files[40].write_bytes(bytes(1000))
    checkpoints.retain(output, 1, {10})
    assert [one.step for one in checkpoints.committed(output)] == [40, 30, 10]
    files[30].write_bytes(bytes(1000))
    files[10].write_bytes(bytes(1000))
    checkpoints.retain(output, 1)
    assert len(list(checkpoints.committed(output))) == 3, "where none is good, none goes"


def test_where_all_checkpoints_are_damaged_the_copy_on_another_store_is_gone_on_from(solo: None, house: House) -> None:
    copies = house.uri("saves-copies")
    training = Training(house, "saves-copied", f"train.checkpoint.copy_to={copies}", "train.checkpoint.keep_last=1")
    training.loop.step(0)
    for step in (1, 2):
        training.loop.save(step)
    expected = training.state(2)
    name = training.task.fingerprint
    local = checkpoints.found(training.output, copies, name)
    assert local is not None
    assert local.uri == checkpoints.address(training.output, 2)
    (training.folder / "checkpoints" / "step-2" / "state-rank-0.safetensors").write_bytes(b"")
    found = checkpoints.found(training.output, copies, name)
    assert found is not None
    got = load_file(store_for(found.uri).local(found.uri) / "state-rank-0.safetensors")
    assert all(torch.equal(got[key], expected[key]) for key in expected)
    own = checkpoints.copies_of(copies, name, training.output)
    assert [one.step for one in checkpoints.committed(own)] == [2]


@pytest.mark.parametrize("mode", ["smoke", "trial"])
def test_what_is_only_tried_leaves_no_copy_of_its_checkpoint(solo: None, house: House, mode: str) -> None:
    copies = house.root / f"saves-{mode}-copies"
    training = Training(house, f"saves-{mode}", f"train.checkpoint.copy_to={copies.as_uri()}")
    training.saver._task = training.task.model_copy(update={"mode": mode})
    training.loop.step(0)
    training.loop.save(1)
    assert training.steps() == [1]
    assert not copies.exists()


def test_a_copy_that_fails_is_told_and_the_checkpoint_stands(solo: None, house: House) -> None:
    (house.root / "saves-no-folder").write_text("a file")
    to = house.uri("saves-no-folder")
    training = Training(house, "saves-uncopied", f"train.checkpoint.copy_to={to}")
    training.loop.step(0)
    training.loop.save(1)
    assert training.steps() == [1]
    assert training.said("copy_failed")[0]["step"] == 1


def test_once_a_stop_is_asked_for_no_copy_is_made_and_the_checkpoint_stands(solo: None, house: House) -> None:
    """A copy to a far store after the last save: it outlasts the grace period, and the stop becomes a kill."""
    to = house.uri("saves-stop-copies")
    training = Training(house, "saves-stop", f"train.checkpoint.copy_to={to}", told=lambda: 1.0)
    with pytest.raises(Preempted, match="step 1 is in a checkpoint"):
        training.loop.run(0, 12)
    assert training.steps() == [1]
    assert "no time for a copy" in training.said("copy_failed")[0]["why"]
    own = checkpoints.copies_of(to, training.task.fingerprint, training.output)
    assert list(checkpoints.committed(own)) == []


class Planned(Validator):
    """A validator that sees the losses it is given."""

    losses: Iterator[float]

    def _look(self) -> Look:
        return Look(next(self.losses), {})


class Failing(Saver):
    """A saver whose disk is full for the save of step 2."""

    def _lead(self, flight: Flight) -> None:
        if flight.step == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super()._lead(flight)


@pytest.mark.parametrize(("losses", "best"), [((2.0, 1.0, 1.5), Best(3, 1.5)), ((2.0, 1.0, 2.5), Best(1, 2.0, 1))])
def test_a_best_step_that_could_not_be_saved_is_the_best_no_longer(
    solo: None, house: House, losses: tuple[float, ...], best: Best
) -> None:
    """Published at the end is a checkpoint that is there: one save that failed does not cost the training."""
    name = f"saves-best-{best.step}"
    training = Training(house, name, "train.validation.every_steps=1", "train.checkpoint.keep_last=1")
    assert training.validator is not None
    training.validator.__class__, training.saver.__class__ = Planned, Failing
    training.validator.losses = iter(losses)
    training.loop.run(0, 3)
    assert training.said("save_failed")[0]["step"] == 2
    assert training.validator.best == best
    assert training.steps() == [3, 1]
    assert checkpoints.best(checkpoints.address(training.output, 3)) == best.as_dict()


def test_what_a_save_took_is_known_before_its_copy_begins(solo: None, house: House) -> None:
    """Counted in, a slow copy keeps the last save before a stop from being begun."""
    known: list[float] = []

    class Copying(Saver):
        def _copy(self, flight: Flight, *more: Any) -> None:
            known.append(flight.seconds)
            super()._copy(flight, *more)

    training = Training(house, "saves-timed", f"train.checkpoint.copy_to={house.uri('saves-timed-copies')}")
    training.saver.__class__ = Copying
    training.loop.step(0)
    training.loop.save(1)
    assert known == [training.saver._durations.slowest]


def test_a_part_is_written_though_the_checkpoint_was_committed_before_its_folder_was_synced(
    solo: None, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A committed save that counts as failed, since a follower's fsync came after rank 0's rename."""
    training = Training(house, "saves-renamed")
    training.loop.step(0)
    draft, final = training.folder / "draft", training.folder / "final"
    draft.mkdir()
    flight = Flight(
        1, 1, checkpoints.KIND, {}, snapshot.Part.take(training.engine, checkpoints.KIND, {}), needed=0,
        keep=frozenset(), refused=False,
    )  # fmt: skip
    training.saver._meeting(1).write_text(str(draft))
    sync = files.sync_folder

    def renamed(folder: Path) -> None:
        if snapshot.written(draft, 1):
            draft.rename(final)
        sync(folder)

    monkeypatch.setattr(files, "sync_folder", renamed)
    training.saver._follow(flight)
    assert snapshot.written(final, 1)


KILLED = """
import os, signal, sys
from pathlib import Path
import test_saves
from conftest import House
from trainer.state import State

house = House(*map(lambda text: Path(text) if text.startswith("/") else text, sys.argv[1:5]))
os.environ |= test_saves.SOLO
test_saves.connect(house.root / "killed-rendezvous", 0, 1)
training = test_saves.Training(house, "saves-killed")
training.loop.step(0)
training.loop.save(1)
State.write = lambda self, folder, rank: os.kill(os.getpid(), signal.SIGKILL)
training.loop.save(2)
"""


@pytest.mark.integration
def test_a_save_killed_before_the_state_is_written_is_never_resumed_from(house: House) -> None:
    """transformers#35782: a save killed half-way must not be resumed from."""
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(house.root), str(house.spec), house.base, house.data],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])}, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == -9, done.stderr
    (draft,) = (house.root / "saves-killed" / "checkpoints").glob(".draft-*")
    assert [path.name for path in draft.iterdir()] == ["rng-rank-0.json"]
    output = house.uri("saves-killed")
    (found,) = checkpoints.committed(output)
    assert checkpoints.newest(output, found.manifest.fingerprint) == found
    assert found.step == 1
    checkpoints.clear_drafts(output)
    assert not draft.exists()


TOLD = """
import os, sys
from pathlib import Path
import test_saves
from conftest import House

house, rank = House(*map(lambda text: Path(text) if text.startswith("/") else text, sys.argv[1:5])), sys.argv[5]
os.environ |= {**test_saves.SOLO, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
test_saves.connect(house.root / "told-rendezvous", int(rank), 2)
training = test_saves.Training(house, "saves-told")
for step, told in enumerate(sys.argv[6:]):
    training.saver._hurry.clear()
    training.loop.step(step)
    training.saver.last(step + 1, test_saves.FACTS, float(told))
    assert training.saver._hurry.is_set()
    print(training.saver.saved_at)
"""


@pytest.mark.integration
def test_a_stop_that_only_one_rank_has_heard_of_is_every_ranks(house: House) -> None:
    """A signal reaches the ranks one by one: who branches by its own clock waits for the others for ever."""
    told = (("0", "1"), ("1", "0"))  # by rank: at the first step the second has heard of it, then the first
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    }  # fmt: skip
    place = [str(house.root), str(house.spec), house.base, house.data]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", TOLD, *place, str(rank), *told[rank]], env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [out.split()[-2:] for out, _ in said] == [["1", "2"], ["1", "2"]], said


@pytest.mark.integration
def test_a_rank_that_cannot_write_its_part_costs_a_save_and_not_the_training(house: House) -> None:
    running = Running(house, "saves-rank-1")
    events = house.root / "saves-rank-1" / "events.jsonl"
    running.until_step(1)
    rank = running.rank(1)
    resource.prlimit(rank, resource.RLIMIT_FSIZE, (32 << 10, resource.RLIM_INFINITY))
    running.until(lambda: b"save_failed" in events.read_bytes())
    resource.prlimit(rank, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    code, _, said = running.end()
    assert code == 0, said
    told = [line["save_failed"] for line in map(json.loads, events.read_text().splitlines()) if "save_failed" in line]
    assert (told[0]["rank"], "File too large" in told[0]["why"]) == (1, True)
    output = house.uri("saves-rank-1")
    assert checkpoints.verify(checkpoints.address(output, STEPS)).step == STEPS
    assert not list((house.root / "saves-rank-1" / "checkpoints").glob(".*")), "nothing half-written is left"


@pytest.mark.integration
def test_a_fast_checkpoint_is_exported_as_the_full_one_of_its_step(house: House, trained: dict[str, Any]) -> None:
    sets = ("train.checkpoint.fast_every_steps=4", "train.checkpoint.every_steps=1000")
    house.train("saves-tiers", sets=sets)
    digests = []
    for output, name in (("alone", "step-4"), ("saves-tiers", "fast-step-4")):
        uri = f"{house.uri(output)}/checkpoints/{name}"
        argv = [sys.executable, "-m", "trainer", "export", uri, "--output", house.uri(f"saves-exported-{name}")]
        code, answer, said = call(argv)
        assert code == 0, said
        digests.append(answer["model_digest"])
    assert digests[0] == digests[1]
