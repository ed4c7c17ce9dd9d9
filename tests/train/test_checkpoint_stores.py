"""Checkpoints on S3, and copies on a store that is down: an outage is no damage, and nothing is fetched twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.client import BaseClient
from botocore.exceptions import ClientError

from refit import fetched
from refit.errors import BadInput, Preempted, StoreUnavailable
from refit.job import STATUS, Job, JobRun
from refit.manifest import Manifest
from refit.pipeline import load
from refit.store import cache_folder, join, store_for, unheard
from refit.store_s3 import S3Store
from tests.proxy import breaking
from trainer import checkpoints, metrics, writer
from trainer.inputs import Inputs, _stage
from trainer.launcher import Launcher
from trainer.metrics import METRICS

TRAINING = "f" * 32


@pytest.fixture
def output(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty output on S3, with an empty cache."""
    monkeypatch.setenv("REFIT_CACHE", str(tmp_path / "cache"))
    return join(s3, tmp_path.name)


def save(output: str, step: int) -> None:
    uri = checkpoints.address(output, step)
    with store_for(uri).publish(uri) as draft:
        (draft.path / "weights").write_bytes(bytes([step]) * 1000)
        draft.commit(Manifest(kind=checkpoints.KIND, fingerprint=TRAINING, facts={"step": step, "dtype": "float32"}))


def zero(output: str, step: int) -> None:
    uri = join(checkpoints.address(output, step), "weights")
    store_for(uri).write(uri, bytes(1000))


def steps(output: str) -> list[int]:
    return [one.step for one in checkpoints.committed(output)]


def refusing(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """Have S3 answer 503 for every object whose key has this part."""
    call = S3Store._call

    def refuse(self: S3Store, method: str, uri: str, **arguments: Any) -> Any:
        if part in uri:
            raise StoreUnavailable(f"{uri}: An error occurred (503)")
        return call(self, method, uri, **arguments)

    monkeypatch.setattr(S3Store, "_call", refuse)


@pytest.mark.parametrize("part", ["step-20/manifest.json", "step-20/"])
def test_an_outage_is_not_taken_for_damage(output: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (10, 20):
        save(output, step)
    with monkeypatch.context() as away:
        refusing(away, part)
        with pytest.raises(StoreUnavailable, match="503"):
            checkpoints.newest(output, TRAINING)
    found = checkpoints.newest(output, TRAINING)
    assert found is not None
    assert found.step == 20


def test_who_waits_for_a_large_checkpoint_is_told_that_it_goes_on(output: str, tmp_path: Path) -> None:
    for place in (output, (tmp_path / "disk").as_uri()):
        uri = checkpoints.address(place, 10)
        with store_for(uri).publish(uri) as draft:
            (draft.path / "weights").write_bytes(bytes(5 << 20))
            draft.commit(Manifest(kind=checkpoints.KIND, fingerprint=TRAINING, facts={"step": 10}))
        told: list[int] = []
        checkpoints.verify(uri, lambda told=told: told.append(1))
        assert len(told) > 5, "with every piece of a file, not only with every file"
        told.clear()
        assert checkpoints.found(place, None, TRAINING, lambda told=told: told.append(1)) is not None
        assert len(told) > 5


def launcher(folder: Path, output: str | None = None) -> Launcher:
    """Of a training whose ranks are not started yet."""
    spec = load(Path(__file__).resolve().parents[2] / "dags" / "pipelines" / "tiny.yaml")
    job = Job.build("train", spec, store=folder.as_uri(), output=output or (folder / "out").as_uri())
    nothing = Path("/nonexistent")
    inputs = Inputs(dataset=nothing, dataset_digest="d", base=nothing, base_digest="b", fingerprint=TRAINING)
    return Launcher(JobRun(job, folder / "out"), inputs, mode="train", dtype="float32", token="ours")


def test_a_launcher_that_hashes_a_checkpoint_has_a_heartbeat_and_heeds_a_stop(tmp_path: Path) -> None:
    mine, out = launcher(tmp_path), tmp_path / "out"
    save(out.as_uri(), 10)
    store_for(out.as_uri()).write(join(out.as_uri(), writer.TOKEN), b'{"token": "ours"}')
    found = mine._found(out.as_uri())
    assert found is not None
    assert json.loads((out / STATUS).read_text())["heartbeat"] > 0
    mine._stop = True
    with pytest.raises(Preempted, match="before this launch"):
        mine._found(out.as_uri())


def test_a_heartbeat_that_cannot_be_written_is_told_once_and_changes_nothing_of_what_is_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the disk is full it read as a store of copies that is away, and an older checkpoint was gone on from."""
    here, copies = (tmp_path / "out").as_uri(), (tmp_path / "copies").as_uri()
    mine = launcher(tmp_path)
    kept = mine._train.checkpoint.model_copy(update={"copy_to": copies})
    mine._train = mine._train.model_copy(update={"checkpoint": kept})
    monkeypatch.setattr(mine._heartbeat, "_every", 0.0)
    save(here, 10)
    save(checkpoints.copies_of(copies, TRAINING, here), 20)
    store_for(here).write(join(here, writer.TOKEN), b'{"token": "ours"}')

    def full(*_: object, **__: object) -> None:
        Path("/dev/full").write_bytes(b"status")

    monkeypatch.setattr(mine._run, "put", full)
    found = mine._found(here)
    assert found is not None
    assert found.step == 20
    told = capsys.readouterr().err
    assert told.count("heartbeat_not_written") == 1
    assert "copies_passed_over" not in told


def test_a_warm_start_that_was_replaced_meanwhile_is_refused(tmp_path: Path) -> None:
    """Between the naming of the training and its launch, or between two launches: it would be a model with the name of
    another."""
    there, mine = (tmp_path / "there").as_uri(), launcher(tmp_path)
    uri = checkpoints.address(there, 5)
    save(there, 5)
    store_for(mine._run.job.output).write(join(mine._run.job.output, writer.TOKEN), b'{"token": "ours"}')
    mine._train = mine._train.model_copy(update={"warm_start": uri})
    named = store_for(uri).require(uri, checkpoints.KIND).content_digest()
    mine._inputs = replace(mine._inputs, warm_start=named)
    mine._look_at_warm_start(None)
    store_for(uri).remove(uri)
    with store_for(uri).publish(uri) as draft:
        (draft.path / "weights").write_bytes(b"another's")
        draft.commit(Manifest(kind=checkpoints.KIND, fingerprint="other", facts={"step": 5}))
    with pytest.raises(BadInput, match=rf"train\.warm_start: .*/step-5 was replaced meanwhile.*{named}"):
        mine._look_at_warm_start(None)


def test_damage_on_s3_is_passed_over_and_goes_once_it_is_proved(output: str) -> None:
    for step in (10, 20, 30, 40):
        save(output, step)
    zero(output, 20)
    zero(output, 40)
    torn = join(checkpoints.address(output, 30), "manifest.json")
    store_for(torn).write(torn, b'{"vers')
    found = checkpoints.newest(output, TRAINING)
    assert found is not None
    assert found.step == 10
    save(output, 15)
    save(output, 60)  # whole, and of the same training: it was passed over for something that is no damage
    checkpoints.retain(output, 2, written=15)
    assert steps(output) == [60, 15, 10]
    store_for(torn).remove(checkpoints.address(output, 30))
    assert not store_for(torn).children(checkpoints.address(output, 30)), "with a torn manifest it can be removed too"


def test_a_copy_that_went_bad_on_this_machine_is_no_damaged_checkpoint(
    output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (10, 20):
        save(output, step)
    uri = checkpoints.address(output, 20)
    for look in (checkpoints.verify, lambda _: checkpoints.newest(output, TRAINING)):
        (store_for(uri).local(uri) / "weights").write_bytes(bytes(1000))
        found = look(uri)
        assert found is not None
        assert found.step == 20
    told = capsys.readouterr().err
    assert "copy_damaged" in told
    assert "checkpoint_damaged" not in told


def test_a_base_model_whose_copy_went_bad_is_fetched_again_and_one_damaged_in_the_store_is_bad_input(
    output: str,
) -> None:
    uri = join(output, "base")
    with store_for(uri).publish(uri) as draft:
        (draft.path / "weights").write_bytes(b"good")
        draft.commit(Manifest(kind="model", fingerprint="m"))
    (store_for(uri).local(uri) / "weights").write_bytes(b"evil")
    folder, _ = _stage(uri, "model", unheard)
    assert (folder / "weights").read_bytes() == b"good"
    (folder / "weights").write_bytes(b"evil")
    store_for(uri).write(join(uri, "weights"), b"evil")
    with pytest.raises(BadInput, match=r"weights differs from its hash.* Make the model again"):
        _stage(uri, "model", unheard)


def test_a_launcher_holds_the_checkpoint_of_its_launch_and_no_other(output: str, tmp_path: Path) -> None:
    """A relaunch an hour, and the disk would be full of checkpoints that nobody reads any more."""
    mine = launcher(tmp_path, output)
    store_for(output).write(join(output, writer.TOKEN), b'{"token": "ours"}')
    copies = []
    for step in (10, 20, 30):
        save(output, step)
        assert mine._task().step == step
        copies.append(store_for(output).local(checkpoints.address(output, step)))
    fetched.make_room(1 << 60)
    assert [copy.exists() for copy in copies] == [False, False, True]


def test_a_launch_reads_no_more_of_a_long_training_than_its_last_steps(tmp_path: Path) -> None:
    mine, out = launcher(tmp_path), tmp_path / "out"
    save(out.as_uri(), 200)
    store_for(out.as_uri()).write(join(out.as_uri(), writer.TOKEN), b'{"token": "ours"}')
    past = b"\xff not to be read\n" * 10_000
    (out / METRICS).write_bytes(past)
    for step in range(101, 301):
        metrics.append(out, {"step": step, "loss": 2.0, "grad_norm": 1.0})
    assert mine._task().step == 200
    assert mine.last["step"] == 200
    assert (out / METRICS).read_bytes().startswith(past)


def work(machine: Launcher, until: int) -> int:
    """Have a machine go on with a training, and save its last step; the step that it went on from."""
    output, folder = machine._run.job.output, machine._run.folder
    begun = machine._task().step
    for step in range(begun + 1, until + 1):
        metrics.append(folder, {"step": step, "loss": 2.0, "grad_norm": 1.0})
    save(output, until)
    machine._upload_metrics()
    return begun


def test_a_machine_that_comes_back_to_a_training_knows_the_steps_that_another_one_took(
    output: str, tmp_path: Path
) -> None:
    """Its own file of before was kept, with a hole in it, and uploaded over the whole one."""
    first, second = (launcher(tmp_path / name, output) for name in ("first", "second"))
    store_for(output).write(join(output, writer.TOKEN), b'{"token": "ours"}')
    assert [work(first, 10), work(second, 20), work(first, 30)] == [0, 10, 20]
    told = [record["step"] for record in metrics.read(first._run.folder)]
    assert told == list(range(1, 31))
    assert [record["step"] for record in metrics.Tail(output).read()] == told


def test_a_machine_that_knows_the_steps_itself_asks_for_none_and_keeps_what_did_not_go_up(
    output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = launcher(tmp_path, output)
    store_for(output).write(join(output, writer.TOKEN), b'{"token": "ours"}')
    work(mine, 10)
    with monkeypatch.context() as away:
        refusing(away, METRICS)
        assert work(mine, 20) == 10
    (mine._run.folder / METRICS).write_bytes((mine._run.folder / METRICS).read_bytes()[:-5])  # 19, and a torn line
    assert mine._task().step == 20
    assert [record["step"] for record in metrics.read(mine._run.folder)] == list(range(1, 20))


def test_job_json_says_what_is_trained_once_the_checkpoints_there_are_known_to_be_of_it(tmp_path: Path) -> None:
    mine, out = launcher(tmp_path), (tmp_path / "out").as_uri()
    save(out, 10)
    store_for(out).write(join(out, writer.TOKEN), b'{"token": "ours"}')
    ours, mine._inputs = mine._inputs, replace(mine._inputs, fingerprint="0" * 32)
    with pytest.raises(BadInput, match="an output folder of its own"):
        mine._task()
    assert not store_for(out).exists(mine._run.job.uri)
    mine._inputs = ours
    mine._task()
    assert Job.load(join(out, "job.json")) == mine._run.job


def test_a_job_json_that_was_given_is_let_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next attempt's may lie there by now."""
    mine, out = launcher(tmp_path), (tmp_path / "out").as_uri()
    monkeypatch.setenv("REFIT_JOB", mine._run.job.model_copy(update={"attempt": 2}).save())
    store_for(out).write(join(out, writer.TOKEN), b'{"token": "ours"}')
    mine._task()
    assert Job.load(join(out, "job.json")).attempt == 2


def test_who_only_judges_checkpoints_holds_none(output: str) -> None:
    for step in (10, 20, 30, 40):
        save(output, step)
    zero(output, 40)
    assert [one.step for one in checkpoints.spare(output, ())] == [10, 20]
    fetched.make_room(1 << 60)
    assert not list(fetched.place().rglob("weights"))


def test_retention_reads_nothing_of_what_was_just_saved(output: str) -> None:
    for step in (10, 20, 30):
        save(output, step)
    checkpoints.retain(output, 1, written=30)
    assert steps(output) == [30]
    assert not list(cache_folder().rglob("*")), "no copy of any checkpoint"


def test_copies_on_a_store_that_is_down_are_passed_over_where_there_is_a_checkpoint(
    output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here, empty = ((tmp_path / name).as_uri() for name in ("here", "empty"))
    save(here, 10)
    for one in (here, empty):
        save(checkpoints.copies_of(output, TRAINING, one), 20)
    with monkeypatch.context() as away:
        refusing(away, "manifest.json")
        found = checkpoints.found(here, output, TRAINING)
        assert found is not None
        assert found.step == 10
        assert "copies_passed_over" in capsys.readouterr().err
        with pytest.raises(StoreUnavailable):
            checkpoints.found(empty, output, TRAINING)
    found = checkpoints.found(here, output, TRAINING)
    assert found is not None
    assert found.step == 20


def test_a_copy_that_is_no_newer_is_not_fetched(output: str, tmp_path: Path) -> None:
    here = (tmp_path / "here").as_uri()
    save(here, 20)
    for step in (10, 20):
        save(checkpoints.copies_of(output, TRAINING, here), step)
    found = checkpoints.found(here, output, TRAINING)
    assert found is not None
    assert found.uri == checkpoints.address(here, 20)
    assert not list(cache_folder().rglob("*"))


def test_the_checkpoint_of_a_step_is_found_among_the_copies_or_said_to_be_gone(output: str, tmp_path: Path) -> None:
    here = (tmp_path / "here").as_uri()
    save(checkpoints.copies_of(output, TRAINING, here), 10)
    assert checkpoints.of_step(here, output, TRAINING, 10).step == 10
    with pytest.raises(BadInput, match=r"step 10 is not there any more.*keep_last"):
        checkpoints.of_step(here, None, TRAINING, 10)


def test_two_outputs_of_one_training_leave_each_others_copies_alone(output: str, tmp_path: Path) -> None:
    """The same recipe into two folders, with one `copy_to`: the second one's start took the first one's upload for what
    a kill had left."""
    ours, theirs = ((tmp_path / name).as_uri() for name in ("ours", "theirs"))
    places = [checkpoints.copies_of(output, TRAINING, one) for one in (ours, theirs)]
    save(places[0], 10)
    half = join(checkpoints.address(places[1], 20), "weights")
    store_for(half).write(half, b"on its way")
    checkpoints.clear_copies(output, TRAINING, ours)
    assert store_for(half).exists(half)
    checkpoints.clear_copies(output, TRAINING, theirs)
    assert not store_for(half).exists(half)
    assert steps(places[0]) == [10]
    assert checkpoints.found(theirs, output, TRAINING) is None
    assert checkpoints.copies_of(output, TRAINING, ours + "/") == places[0]


def test_a_copy_from_before_outputs_had_their_own_place_is_gone_on_from(output: str, tmp_path: Path) -> None:
    here = (tmp_path / "here").as_uri()
    save(here, 5)
    save(join(output, TRAINING), 10)
    found = checkpoints.found(here, output, TRAINING)
    assert found is not None
    assert found.step == 10
    assert checkpoints.of_step(here, output, TRAINING, 10).step == 10
    save(checkpoints.copies_of(output, TRAINING, here), 20)
    found = checkpoints.found(here, output, TRAINING)
    assert found is not None
    assert found.step == 20


def test_what_is_left_of_a_removal_is_cleared_of_fast_ones_too(tmp_path: Path) -> None:
    left = tmp_path / "checkpoints" / "fast-step-7"
    left.mkdir(parents=True)
    (left / "state-rank-0.safetensors").write_bytes(b"rest")
    checkpoints.clear_drafts(tmp_path.as_uri())
    assert not left.exists()


def test_a_copy_is_made_of_the_files_at_hand_and_one_that_is_cut_short_leaves_nothing(
    output: str, tmp_path: Path
) -> None:
    """The draft of what was just uploaded still lies here: it is not fetched back to be copied."""
    save(output, 10)
    uri, draft, to = checkpoints.address(output, 10), tmp_path / "draft", join(output, "copies")
    draft.mkdir()
    (draft / "weights").write_bytes(bytes([10]) * 1000)
    made = checkpoints.Checkpoint(uri, 10, store_for(uri).require(uri, checkpoints.KIND))

    def stop() -> None:
        raise StoreUnavailable("told to stop")

    with pytest.raises(StoreUnavailable, match="told to stop"):
        checkpoints.copy(made, to, draft, check=stop)
    assert steps(to) == []
    heard: list[int] = []
    checkpoints.copy(made, to, draft, heard=lambda: heard.append(1))
    assert len(heard) > 1, "while it is copied here, and while it goes up"
    assert not list(cache_folder().rglob("*"))
    assert checkpoints.verify(checkpoints.address(to, 10)).step == 10
    (draft / "weights").write_bytes(bytes(1000))
    with pytest.raises(StoreUnavailable, match="taken away again"):
        checkpoints.copy(made, to, draft)
    assert steps(to) == []


SAVE = """
import sys
from refit.manifest import Manifest
from refit.store import store_for
from trainer import checkpoints
uri = checkpoints.address(sys.argv[1], 20)
with store_for(uri).publish(uri) as draft:
    (draft.path / "small").write_bytes(bytes(1000))
    (draft.path / "weights").write_bytes(bytes(20 << 20))
    draft.commit(Manifest(kind=checkpoints.KIND, fingerprint="f" * 32, facts={"step": 20}))
"""


@pytest.mark.integration
def test_a_process_that_is_killed_in_an_upload_leaves_no_checkpoint_and_the_next_start_clears_it_up(
    output: str, tmp_path: Path
) -> None:
    """The launcher kills ranks whose upload does not end within the grace period. Parts of an upload that never ended
    are in no listing, and are paid for."""
    client = boto3.client("s3")
    bucket, prefix = output.removeprefix("s3://").split("/", 1)
    save(output, 10)
    host, port = client.meta.endpoint_url.removeprefix("http://").split(":")
    with breaking(host, int(port), []) as network:
        network.hold = b"partNumber=2"
        # The trainer is not installed beside the S3: the child finds it where this process does.
        place = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{network.port}", "PYTHONPATH": os.pathsep.join(sys.path)}
        saving = subprocess.Popen([sys.executable, "-c", SAVE, output], env={**os.environ, **place})
        assert network.held.wait(60)
        saving.kill()
        saving.wait()
    uploads = lambda: client.list_multipart_uploads(Bucket=bucket, Prefix=prefix).get("Uploads", [])  # noqa: E731
    assert len(uploads()) == 1, "in the midst of it"
    left = join(checkpoints.address(output, 20), "small")
    assert store_for(left).exists(left)
    mine = launcher(tmp_path, output)
    store_for(output).write(join(output, writer.TOKEN), b'{"token": "ours"}')
    found = mine._found(output)
    assert found is not None
    assert found.step == 10
    other = client.create_multipart_upload(Bucket=bucket, Key=f"{prefix}/export/model")
    checkpoints.clear_drafts(output)
    assert not store_for(left).exists(left)
    assert [upload["UploadId"] for upload in uploads()] == [other["UploadId"]], "of checkpoints only"
    assert steps(output) == [10]
    save(output, 20)
    assert steps(output) == [20, 10]


def test_a_store_that_does_not_show_unfinished_uploads_hinders_nothing(
    output: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(output, 10)
    junk = join(checkpoints.address(output, 20), "weights")
    store = store_for(junk)
    store.write(junk, b"half")

    class Refusing:
        def paginate(self, **_: str) -> None:
            raise ClientError({"Error": {"Code": "AccessDenied"}}, "ListMultipartUploads")

    def paginator(self: BaseClient, name: str) -> Any:
        return Refusing() if name == "list_multipart_uploads" else really(self, name)

    really = BaseClient.get_paginator
    monkeypatch.setattr(BaseClient, "get_paginator", paginator)
    checkpoints.clear_drafts(output)
    assert not store.exists(junk)
    assert steps(output) == [10]
    assert "uploads_not_swept" in capsys.readouterr().err
