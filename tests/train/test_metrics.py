"""metrics.jsonl from its end: going back to a step, and what the last steps were, whatever a kill has left."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hypothesis", reason="the control venv has it")
from hypothesis import given
from hypothesis import strategies as st

from trainer import metrics
from trainer.metrics import METRICS


def lines_of(records: list[dict[str, Any]]) -> list[bytes]:
    return [json.dumps(record).encode() + b"\n" for record in records]


@given(
    widths=st.lists(st.integers(0, 90), max_size=30), step=st.integers(0, 35), block=st.integers(1, 200),
    count=st.integers(0, 12), torn=st.dictionaries(st.integers(0, 30), st.integers(1, 8), max_size=3),
    cut=st.integers(0, 30),
)  # fmt: skip
def test_going_back_to_a_step_keeps_what_was_written_up_to_it_wherever_blocks_and_kills_fall(
    widths: list[int], step: int, block: int, count: int, torn: dict[int, int], cut: int
) -> None:
    """Lines that a full disk tore stand among them, and the last one is cut short by a kill."""
    records = [{"step": 1 + number, "why": "é" * width} for number, width in enumerate(widths)]
    lines = lines_of(records)
    for number, length in sorted(torn.items(), reverse=True):
        if number < len(lines):
            lines.insert(number, lines[number][:length] + b"\n")
    text = b"".join(lines)
    with pytest.MonkeyPatch.context() as patched, tempfile.TemporaryDirectory() as name:
        patched.setattr(metrics, "BLOCK", block)
        folder = Path(name)
        (folder / METRICS).write_bytes(text[: len(text) - cut] if cut < len(text) else text)
        kept = [record for record in metrics.read(folder) if record["step"] <= step]
        metrics.rewind(folder, step)
        assert metrics.read(folder) == kept
        assert metrics.last(folder, count) == kept[len(kept) - min(count, len(kept)) :]
        metrics.append(folder, {"step": step + 1})
        assert metrics.read(folder) == [*kept, {"step": step + 1}]
        written = (folder / METRICS).read_bytes()
        if kept:  # what a kill cut short has gone: nothing stands between the two
            assert written.endswith(b"".join(lines_of([kept[-1], {"step": step + 1}])))


def test_a_resume_reads_the_end_of_a_long_training_and_no_more(tmp_path: Path) -> None:
    """It was all read, twice, and written anew: with each launch more of it."""
    past = b"\xff not to be read\n" * 100_000
    records = [{"step": step, "loss": 2.0, "grad_norm": 1.0} for step in range(1_000_001, 1_000_501)]
    (tmp_path / METRICS).write_bytes(past + b"".join(lines_of(records)))
    metrics.rewind(tmp_path, 1_000_400)
    assert metrics.last(tmp_path, 300) == records[100:400]
    assert (tmp_path / METRICS).read_bytes() == past + b"".join(lines_of(records[:400]))


def test_there_is_nothing_to_go_back_in_before_the_first_step(tmp_path: Path) -> None:
    metrics.rewind(tmp_path, 0)
    assert metrics.last(tmp_path, 300) == metrics.read(tmp_path) == []
    metrics.append(tmp_path, {"step": 1})
    metrics.rewind(tmp_path, 0)
    assert metrics.read(tmp_path) == []
