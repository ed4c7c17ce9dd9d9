"""A trainer that was thought dead, whose output is another's by now; and what a trainer puts where others look for it.

On S3, where there is no lock, and each machine has a folder of its own. Runs in the control venv, where moto is.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from threading import Thread
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("moto", reason="the control venv has it")
from refit.errors import (
    Diverged,
    Infrastructure,
    NodeLost,
    Occupied,
    Preempted,
    PreflightRefused,
    RefitError,
    StoreUnavailable,
)
from refit.fingerprint import digest
from refit.job import EVENTS, STATUS, Job, JobRun, read_events
from refit.packed import Packed
from refit.pipeline import load
from refit.states import State
from refit.store import join, store_for
from refit.store_s3 import S3Store
from trainer import pauses, scene, tried, writer
from trainer.inputs import Inputs
from trainer.launcher import Launcher
from trainer.metrics import METRICS
from trainer.pauses import Pauses

TINY = Path(__file__).resolve().parents[2] / "dags" / "pipelines" / "tiny.yaml"


@pytest.fixture
def output(s3: str, tmp_path: Path) -> str:
    return f"{s3}/{tmp_path.name}"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches follow each other at once."""
    monkeypatch.setattr(pauses, "FIRST", 0.0)


def launcher(output: str, folder: Path, token: str, kind: type[Launcher] = Launcher) -> Launcher:
    """Of one machine, which has a folder of its own."""
    job = Job.build("train", load(TINY), store=output.rpartition("/")[0], output=output)
    return kind(JobRun(job, folder), cast(Inputs, None), mode="train", dtype="float32", token=token)


def dying(error: RefitError, meanwhile: Callable[[], object]) -> type[Launcher]:
    """A launcher whose launch ends in this way, after something else has happened."""

    class Dying(Launcher):
        def _launch(self, launch: int) -> dict[str, Any]:
            meanwhile()
            raise error

    return Dying


@pytest.mark.parametrize("error", [None, NodeLost("a rank is gone"), Diverged("step 3: NaN")], ids=repr)
def test_a_trainer_that_another_one_succeeded_is_not_launched_again_and_touches_nothing(
    output: str, tmp_path: Path, error: RefitError | None
) -> None:
    """The successor's drafts, its records and its words stay as they are."""
    store, theirs = store_for(output), (METRICS, EVENTS, STATUS, "checkpoints/.draft-step-4/weights")
    with ExitStack() as machines:
        token = machines.enter_context(writer.sole(tmp_path / "zombie", output))

        def succeeded() -> None:
            machines.enter_context(writer.sole(tmp_path / "successor", output))
            for name in theirs:
                store.write(join(output, name), b'{"step": 5}')

        if error is None:
            succeeded()
        kind = dying(error, succeeded) if error else Launcher
        with pytest.raises(Occupied, match="another trainer has taken over"):
            launcher(output, tmp_path / "zombie", token, kind).supervise()
    assert [store.read(join(output, name)) for name in theirs] == [b'{"step": 5}'] * 4


def test_a_trainer_that_still_holds_its_output_tells_of_a_loss_and_ends_with_its_kind(
    output: str, tmp_path: Path
) -> None:
    with writer.sole(tmp_path / "one", output) as token:
        mine = launcher(output, tmp_path / "one", token, dying(NodeLost("a rank is gone"), lambda: None))
        mine._run.event(State.RUNNING, "attempt 1")
        with pytest.raises(NodeLost, match="were lost"):
            mine.supervise()
    assert b"a rank is gone" in store_for(output).read(join(output, EVENTS))


def test_a_scene_is_found_where_the_output_is(output: str, tmp_path: Path) -> None:
    """`trainer replay` asks the store, on whatever machine it is; rank 0 wrote to its own."""
    zeros = np.zeros((2, 4))
    split = cast(Packed, type("Split", (), {"tokens": zeros, "segments": zeros, "mask": zeros}))
    with writer.sole(tmp_path, output) as token:

        def give_up() -> None:
            scene.keep_skipped(tmp_path, {"step": 3, "why": "NaN", "checkpoint": 2}, [1], split, [{}])
            scene.keep(tmp_path, {"step": 7, "why": "NaN again", "checkpoint": 6}, [1], split, [{}])

        mine = launcher(output, tmp_path, token, dying(Diverged("step 7"), give_up))
        with pytest.raises(Diverged):
            mine.supervise()
        assert scene.read(output) == scene.Scene(7, "NaN again", 6, (digest({}),))
        mine._upload_scene(3)
    assert scene.read(output, 3) == scene.Scene(3, "NaN", 2, (digest({}),))
    assert store_for(output).exists(join(output, "scenes/step-3.npz"))


@pytest.mark.parametrize(
    ("error", "becomes"), [(NodeLost("signal 9"), PreflightRefused), (StoreUnavailable("x"), NodeLost)]
)
def test_a_store_that_is_away_during_the_first_look_says_nothing_of_the_machine(
    output: str, tmp_path: Path, error: RefitError, becomes: type[RefitError], impatient: None
) -> None:
    """A refusal is never tried again; a rank that is lost there was most likely killed for memory."""
    with writer.sole(tmp_path, output) as token:
        mine = launcher(output, tmp_path, token, dying(error, lambda: setattr(mine, "_phase", tried.LOOK)))
        mine._run.event(State.RUNNING, "attempt 1")
        with pytest.raises(becomes):
            mine.supervise()


def test_a_rank_that_is_lost_is_replaced_at_once_and_an_outage_is_waited_for() -> None:
    pause, away, lost = Pauses(), StoreUnavailable("503"), NodeLost("signal 9")
    assert [pause.after(away, stepped=False) for _ in range(5)] == [5, 20, 80, 300, 300]
    assert [pause.after(lost, stepped=stepped) for stepped in (True, False)] == [0, 0]
    assert pause.after(away, stepped=True) == 5, "the store was there again meanwhile"
    assert pause.after(Infrastructure("3 saves in a row have failed"), stepped=False) == 20


def test_an_outage_does_not_burn_all_launches_at_once(
    output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    monkeypatch.setattr(Launcher, "_rest", lambda _self, seconds, _error: asked.append(seconds))

    class Back(Launcher):
        def _launch(self, launch: int) -> dict[str, Any]:
            if launch < 4:
                raise StoreUnavailable("503")
            return {"launch": launch}

    with writer.sole(tmp_path, output) as token:
        mine = launcher(output, tmp_path, token, Back)
        mine._run.event(State.RUNNING, "attempt 1")
        assert mine.supervise() == {"launch": 4}
    assert asked == [5, 20, 80]


def stopping(events: Path) -> None:
    """Tell this process to stop once it waits for the next launch."""
    while not (events.is_file() and b"launched again" in events.read_bytes()):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_stop_ends_the_wait_for_the_next_launch(output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pauses, "FIRST", 3600.0)
    monkeypatch.setattr(pauses, "LONGEST", 3600.0)
    with writer.sole(tmp_path, output) as token:
        mine = launcher(output, tmp_path, token, dying(StoreUnavailable("503"), lambda: None))
        mine._run.event(State.RUNNING, "attempt 1")
        stop = Thread(target=stopping, args=(tmp_path / EVENTS,))
        stop.start()
        with pytest.raises(Preempted, match="between two launches"):
            mine.supervise()
        stop.join()
        mine._run.event(State.SUSPENDED, "told to stop")  # which may follow what was told of the wait
    assert b"launched again in 3600 s: 503" in store_for(output).read(join(output, EVENTS))


def test_a_store_that_is_away_for_a_heartbeat_ends_no_launch_and_events_come_late(
    output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with writer.sole(tmp_path / "one", output) as token:
        mine = launcher(output, tmp_path / "one", token)
        with monkeypatch.context() as away:
            away.setattr(S3Store, "_call", refused)
            mine._run.event(State.RUNNING, "attempt 1")
            mine._show()
        with pytest.raises(FileNotFoundError):
            store_for(output).read(join(output, EVENTS))
        mine._run.event(State.RUNNING, "a remark")
        told = read_events(store_for(output).read(join(output, EVENTS)).decode())
        assert [event["reason"] for event in told] == ["attempt 1", "a remark"]
        mine._heartbeat._beaten = 0.0
        with writer.sole(tmp_path / "other", output), pytest.raises(Occupied):
            mine._show()


def refused(_store: S3Store, _method: str, uri: str, **_more: Any) -> Any:
    raise StoreUnavailable(f"{uri}: An error occurred (503)")
