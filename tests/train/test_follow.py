"""What somebody sees who looks on at a training."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from conftest import House, call

from refit.errors import BadInput
from refit.manifest import Manifest
from refit.store import store_for
from trainer import checkpoints, metrics, view
from trainer.follow import follow, look
from trainer.view import Scene

NOW = 1_000_000.0
EVENT = {"state": "running", "reason": "attempt 2 on node-a", "attempt": 2}
STATUS = {
    "phase": "train", "done": 40, "total": 100, "seconds_left": 1800.0, "tokens_per_second": 1820.4,
    "heartbeat": NOW - 3, "host": "node-a", "loss": 2.0,
}  # fmt: skip


def record(step: int, **more: Any) -> dict[str, Any]:
    parts = {"data": 0.1, "forward": 0.4, "backward": 0.9, "wait": 0.2, "optimizer": 0.3}
    return {"step": step, "loss": 3 - step / 41, "grad_norm": 0.75, "lr": 2e-4, "seconds": 2.0, **parts, **more}


SCENE = Scene(event=EVENT, status=STATUS, records=[record(step) for step in range(32, 42)], checkpoint=(30, NOW - 600))


def test_the_view_tells_it_all_in_seven_lines() -> None:
    assert view.render(SCENE, NOW) == [
        "state  running (attempt 2): attempt 2 on node-a",
        "step   train  41 of 100  ████████████░░░░░░░░░░░░░░░░░░  41 %  30 min left",
        "loss   2  █▇▆▆▅▄▃▃▂▁  gradient 0.75  rate 0.0002",
        "pace   1,820 tokens/s",
        "time % data 5, forward 20, backward 45, wait 10, optimizer 15, other 5",
        "saved  step 30  10 min ago",
        "heard  3 s ago from node-a",
    ]  # fmt: skip


def test_no_line_is_wider_than_the_terminal() -> None:
    long = Scene(event={**EVENT, "reason": "a very long\nreason " * 20}, status=STATUS, records=SCENE.records)
    for width in (20, 40, 79):
        lines = view.render(long, NOW, width)
        assert max(map(len, lines)) <= width
        assert not any("\n" in line for line in lines)


def test_a_training_that_has_said_nothing_yet_is_shown_too() -> None:
    lines = view.render(Scene(event=EVENT), NOW)
    assert [line.split()[0] for line in lines] == ["state", "step"]
    assert "0 of 0" in lines[1]


def test_a_silent_heartbeat_is_remarked_upon_unless_the_job_has_ended() -> None:
    assert "is it still there?" in view.render(SCENE, NOW + 60)[-1]
    ended = Scene(event={**EVENT, "state": "succeeded"}, status=STATUS)
    assert "is it still there?" not in "\n".join(view.render(ended, NOW + 60))


def test_a_save_counts_in_the_split_and_nothing_is_more_than_all() -> None:
    lines = view.render(Scene(event=EVENT, records=[record(1, save=3.0)]), NOW)
    assert lines[-1] == "time % data 2, forward 8, backward 18, wait 4, optimizer 6, save 60, other 2"


def test_the_pace_is_the_records_where_no_heartbeat_has_told_it() -> None:
    assert "pace   250 tokens/s" in view.render(Scene(event=EVENT, records=[record(1, tokens=500)]), NOW)


def test_a_sparkline_spans_from_the_least_to_the_greatest() -> None:
    assert view.sparkline([0, 7, 3.5, float("nan"), 7]) == "▁█▅ █"
    assert view.sparkline([2.0, 2.0]) == "▁▁"
    assert view.sparkline([float("nan")]) == ""
    assert len(view.sparkline([1.0] * 100, width=24)) == 24


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """A training at step 3 of 10, with a checkpoint, whose fourth record is being written."""
    (tmp_path / "events.jsonl").write_text(json.dumps(EVENT) + "\n")
    (tmp_path / "status.json").write_text(json.dumps({**STATUS, "done": 3, "total": 10}))
    for step in (1, 2, 3):
        metrics.append(tmp_path, record(step))
    with (tmp_path / "metrics.jsonl").open("ab") as handle:
        handle.write(b'{"step": 4, "lo')
    uri = checkpoints.address(tmp_path.as_uri(), 2)
    with store_for(uri).publish(uri) as draft:
        draft.commit(Manifest(kind="checkpoint", fingerprint="f" * 32, facts={"step": 2}))
    return tmp_path


def test_a_torn_record_is_not_read(output: Path) -> None:
    scene = look(output.as_uri(), metrics.Tail(output.as_uri()))
    assert [one["step"] for one in scene.records] == [1, 2, 3]
    assert scene.checkpoint is not None
    assert scene.checkpoint[0] == 2


def test_of_a_long_file_only_the_end_is_read(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = (output / "metrics.jsonl").stat().st_size
    monkeypatch.setattr(metrics, "TAIL_BYTES", size // 2)
    assert [one["step"] for one in look(output.as_uri(), metrics.Tail(output.as_uri())).records] == [3]


def test_without_a_terminal_a_line_is_printed_when_something_changed_until_the_end(output: Path) -> None:
    looked = 0

    def pause(_seconds: float) -> None:
        nonlocal looked
        looked += 1
        if looked == 2:
            metrics.append(output, record(5))
        if looked == 4:
            with (output / "events.jsonl").open("a") as handle:
                handle.write(json.dumps({**EVENT, "state": "succeeded", "reason": "manifest written"}) + "\n")

    to = io.StringIO()
    follow(output.as_uri(), to=to, pause=pause, clock=lambda: NOW)
    lines = to.getvalue().splitlines()
    assert len(lines) == 3, "two looks at the same thing are one line"
    assert "3 of 10" in lines[0]
    assert "5 of 10" in lines[1]
    assert lines[2].startswith("succeeded (attempt 2): manifest written")
    assert "\x1b" not in to.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_it_redraws_in_place_and_a_ctrl_c_ends_it_quietly(output: Path) -> None:
    looked = 0

    def pause(_seconds: float) -> None:
        nonlocal looked
        looked += 1
        if looked == 2:
            raise KeyboardInterrupt

    to = Terminal()
    follow(output.as_uri(), to=to, pause=pause, clock=lambda: NOW)
    first, second = to.getvalue().split("\x1b[J")
    lines = first.count("\n")
    assert first.endswith(f"\x1b[{lines}F")
    assert second.count("\n") == lines


def test_where_no_job_ran_there_is_nothing_to_watch(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no job has run there"):
        look(tmp_path.as_uri(), metrics.Tail(tmp_path.as_uri()))


@pytest.mark.integration
def test_looking_on_at_a_finished_training_ends_at_once_with_the_same_answer(house: House, trained: dict) -> None:
    program = house.argv("run")[:3]
    plain = call([*program, "status", house.uri("alone")])
    code, answer, said = call([*program, "status", house.uri("alone"), "--watch"])
    assert (code, answer) == plain[:2]
    assert "12 of 12" in said
    assert "succeeded" in said
