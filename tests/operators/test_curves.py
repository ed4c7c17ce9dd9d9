"""A training's steps as curves."""

from __future__ import annotations

from pathlib import Path

from operators import curves


def test_a_long_training_is_thinned_and_its_looks_and_its_end_are_kept() -> None:
    records = [{"step": step, "loss": 1.0, "seconds": 0.25} for step in range(1, 12_346)]
    records[6999] |= {"validation_loss": 0.5, "validation_losses": {"mail/de": 0.75}}
    losses = [point for point in curves.points(records) if point.key == "train/loss"]
    assert curves.MOST_STEPS / 2 < len(losses) <= curves.MOST_STEPS + 1
    assert (losses[-1].step, losses[-1].at) == (12_345, 3_086_250)
    looks = [point for point in curves.points(records) if "validation" in point.key]
    assert [(point.key, point.value, point.step) for point in looks] == [
        ("train/validation_loss", 0.5, 7000), ("train/validation_loss/mail_de", 0.75, 7000),
    ]  # fmt: skip


def test_what_is_no_number_is_left_out_and_a_torn_line_too(tmp_path: Path) -> None:
    lines = (
        '{"step": 1, "loss": null, "seconds": 1, "lr": 1e-4}\n{"step": 2, "loss": NaN, "seconds": 1}\n{"step": 3, "lo'
    )
    (tmp_path / "metrics.jsonl").write_text(lines)
    assert [(point.key, point.step) for point in curves.points(curves.read(tmp_path.as_uri()))] == [
        ("train/lr", 1), ("train/seconds", 1), ("train/seconds", 2),
    ]  # fmt: skip
    assert curves.read((tmp_path / "elsewhere").as_uri()) == []
