"""A trainer that comes while another one is ending: it waits, and what the other said last is not its own state."""

from __future__ import annotations

import os
from pathlib import Path

from conftest import House

from refit.errors import Preempted
from refit.job import Job, JobRun, read_events, run
from refit.manifest import Manifest
from refit.pipeline import load
from refit.states import State
from trainer import stage


def test_a_trainer_that_waits_for_one_that_is_told_to_stop_goes_on_after_it(house: House, tmp_path: Path) -> None:
    job = Job.build("train", load(house.spec), store=tmp_path.as_uri(), output=(tmp_path / "out").as_uri())
    took, take = os.pipe()
    wait, tell = os.pipe()

    def first(running: JobRun) -> Manifest:
        with stage._sole(running):
            os.write(take, b"x")
            os.read(wait, 1)
            raise Preempted("told to stop")

    def second(running: JobRun) -> Manifest:
        os.write(tell, b"x")
        with stage._sole(running):
            running.event(State.RUNNING, "a remark")
            return Manifest(kind="train", fingerprint="f")

    if (child := os.fork()) == 0:
        try:
            run(job, first)
        finally:
            os._exit(0)
    os.read(took, 1)
    run(job.model_copy(update={"attempt": 2}), second)
    os.waitpid(child, 0)
    for descriptor in (took, take, wait, tell):
        os.close(descriptor)
    told = [(event["state"], event["attempt"]) for event in read_events((tmp_path / "out/events.jsonl").read_text())]
    assert told == [
        ("running", 1), ("running", 2), ("suspended", 1), ("retrying", 2), ("running", 2), ("running", 2),
        ("succeeded", 2),
    ]  # fmt: skip
