"""A training's steps as curves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from operators import curves
from operators.curves import Growing, Point


def write(folder: Path, records: list[dict[str, Any]]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def taken(curve: Growing, *, ended: bool = False) -> list[Point]:
    """The points of all batches, which are kept now."""
    found = []
    for batch in curve.batches(ended=ended):
        assert len(batch) <= curves.BATCH
        curve.keep(batch)
        found += batch
    return found


def losses(points: list[Point]) -> list[tuple[int, float, int]]:
    return [(point.step, point.value, point.at) for point in points if point.key == "train/loss"]


def test_a_long_training_is_thinned_and_its_looks_and_its_end_are_kept(tmp_path: Path) -> None:
    records = [{"step": step, "loss": 1.0, "seconds": 0.25} for step in range(1, 12_346)]
    records[6999] |= {"validation_loss": 0.5, "validation_losses": {"mail/de": 0.75}}
    records[7000] |= {"loss": None, "skips": 1}
    write(tmp_path, records)
    points = taken(Growing(tmp_path.as_uri(), 12_345), ended=True)
    assert curves.MOST_STEPS / 2 < len(losses(points)) <= curves.MOST_STEPS + 1
    assert losses(points)[-1] == (12_345, 1.0, 3_086_250)
    assert [point[:2] + point[3:] for point in points if "validation" in point.key or point.key == "train/skips"] == [
        ("train/validation_loss", 0.5, 7000), ("train/validation_loss/mail_de", 0.75, 7000), ("train/skips", 1.0, 7001),
    ]  # fmt: skip


def test_what_is_appended_is_taken_once_and_steps_that_a_resume_takes_again_are_not(tmp_path: Path) -> None:
    def record(step: int, loss: float) -> dict[str, Any]:
        return {"step": step, "loss": loss, "seconds": 1.0}

    curve = Growing(tmp_path.as_uri(), 10)
    assert taken(curve) == []
    told = [record(step, 0.5) for step in range(1, 6)]
    write(tmp_path, told)
    assert [step for step, *_ in losses(taken(curve))] == [1, 2, 3, 4, 5]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record(6, 0.5)))  # not whole yet
    assert taken(curve) == []
    again = [*told[:3], *(record(step, 0.25) for step in range(4, 9))]  # back to step 3
    write(tmp_path, again)
    assert losses(taken(curve)) == [(6, 0.25, 6000), (7, 0.25, 7000), (8, 0.25, 8000)]
    assert taken(curve, ended=True) == []


def test_what_was_not_kept_comes_again(tmp_path: Path) -> None:
    write(tmp_path, [{"step": step, "loss": 0.5, "seconds": 1.0} for step in range(1, 6)])
    curve = Growing(tmp_path.as_uri(), 5)
    first = list(curve.batches())
    curve.keep([point for batch in first for point in batch if point.step <= 2])
    (rest,) = curve.batches()
    assert rest == [point for batch in first for point in batch if point.step > 2]


def test_a_look_that_comes_later_than_its_step_is_not_passed_over(tmp_path: Path) -> None:
    """A stop cut it short; the next try looks, and puts what it found into the last record."""
    records: list[dict[str, Any]] = [{"step": step, "loss": 0.5, "seconds": 1.0} for step in range(1, 6)]
    write(tmp_path, records)
    curve = Growing(tmp_path.as_uri(), 10)
    taken(curve, ended=True)
    records[-1] |= {"validation_loss": 0.75}
    write(tmp_path, records)
    assert taken(curve) == [Point("train/validation_loss", 0.75, 5000, 5)]
    again = Growing(tmp_path.as_uri(), 10)  # as after a restart, which asks MLflow how far it is
    again.logged, again.looked = curve.logged, curve.looked
    assert taken(again, ended=True) == []


def test_what_is_no_number_is_left_out_and_a_torn_line_too(tmp_path: Path) -> None:
    lines = (
        '{"step": 1, "loss": null, "seconds": 1, "lr": 1e-4}\n{"step": 2, "loss": NaN, "seconds": 1}\n{"step": 3, "lo'
    )
    (tmp_path / "metrics.jsonl").write_text(lines)
    assert [(point.key, point.step) for point in taken(Growing(tmp_path.as_uri(), 3))] == [
        ("train/lr", 1), ("train/seconds", 1), ("train/seconds", 2),
    ]  # fmt: skip
    assert taken(Growing((tmp_path / "elsewhere").as_uri(), 3), ended=True) == []
