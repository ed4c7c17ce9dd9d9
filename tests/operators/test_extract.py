"""What is chosen of a quarantine: bounded, of every kind of reason, with the true counts, and text that can be kept."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from corpus.quarantine import Quarantine
from operators import extract
from operators.extract import OTHER, shares


def write(path: Path, reasons: list[str], sources: list[str] | None = None, sample: str = "x") -> Path:
    count = len(reasons)
    table = pa.table(
        {"source": sources or ["mail"] * count, "file": ["part.jsonl"] * count, "line": np.arange(count),
         "reason": reasons, "sample": [sample] * count}
    )  # fmt: skip
    pq.write_table(table, path)
    return path


def test_a_million_rows_give_a_bounded_number_and_examples_of_every_reason(tmp_path: Path) -> None:
    reasons = ["not JSON: line"] * 999_990 + ["length: 0 characters"] * 9 + ["rare"]
    found = extract.extract(write(tmp_path / "q.parquet", reasons))
    assert len(found.rows) == extract.MOST
    assert found.counts == {("mail", "not JSON"): 999_990, ("mail", "length"): 9, ("mail", "rare"): 1}
    assert Counter(row.kind for row in found.rows) == {"not JSON": extract.MOST - 10, "length": 9, "rare": 1}
    numbers = [row.number for row in found.rows]
    assert numbers == sorted(set(numbers))
    assert [row.line for row in found.rows] == numbers
    assert 999_000 > np.median(numbers[:-10]) > 400_000, "spread over the file, not its first rows"


def test_the_same_file_gives_the_same_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "q.parquet", [f"kind {n % 7}: {n}" for n in range(5_000)])
    assert extract.extract(path, 100) == extract.extract(path, 100)


def test_kinds_are_counted_as_the_data_stage_counts_them(tmp_path: Path) -> None:
    reasons = ["not JSON: at 3", "not JSON: at 4", "a: b: c", "no colon", ":", "two\nlines: x"]
    with Quarantine(tmp_path / "q.parquet") as bad:
        for number, reason in enumerate(reasons):
            bad.add("mail", "f", number, reason, "x")
    counts = extract.extract(tmp_path / "q.parquet").counts
    assert {kind: count for (_, kind), count in counts.items()} == bad.reasons()


def test_reasons_without_end_are_counted_together(tmp_path: Path) -> None:
    found = extract.extract(write(tmp_path / "q.parquet", [f"reason {n}" for n in range(100_000)]))
    assert len(found.counts) == extract.KINDS + 1
    assert found.counts.total() == 100_000
    assert found.counts["", OTHER] == 100_000 - extract.KINDS
    assert len(found.rows) == extract.MOST


def test_an_empty_quarantine_gives_nothing(tmp_path: Path) -> None:
    with Quarantine(tmp_path / "q.parquet"):
        pass
    found = extract.extract(tmp_path / "q.parquet")
    assert (found.counts, found.rows) == ({}, [])


def test_small_groups_are_whole_and_leave_the_rest_to_large_ones() -> None:
    assert shares({("a", "x"): 2, ("a", "y"): 100, ("b", "x"): 100}, 50) == {
        ("a", "x"): 2, ("a", "y"): 24, ("b", "x"): 24,
    }  # fmt: skip


def test_what_is_no_text_becomes_text_and_is_clipped(tmp_path: Path) -> None:
    raw = pa.array([b"\xff\xfe bad \xed\xb2\x80", b"nul\0nul", "ü".encode() * 1_000_000, None], pa.binary())
    texts = pa.StringArray.from_buffers(len(raw), raw.buffers()[1], raw.buffers()[2], raw.buffers()[0])
    columns = {"source": texts, "file": texts, "line": pa.array([1, 2, 3, None]), "reason": texts, "sample": texts}
    pq.write_table(pa.table(columns), tmp_path / "q.parquet")
    rows = extract.extract(tmp_path / "q.parquet").rows
    assert len(rows) == 4
    assert rows[1].sample == "nul␀nul"
    assert (len(rows[2].sample), len(rows[2].kind)) == (500, 200)
    for row in rows:
        for value in row[1:]:
            assert "\0" not in str(value).encode().decode()
