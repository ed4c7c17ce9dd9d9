"""A model's own answers, as a source that its training can rehearse."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from conftest import House, call

from refit.errors import BadInput

pytestmark = pytest.mark.integration


def rehearse(base: str, prompts: Path, output: Path, *arguments: str) -> tuple[int, dict, str]:
    program = [sys.executable, "-m", "trainer", "rehearse", base, str(output), "--prompts", str(prompts)]
    return call([*program, *arguments])


def test_finished_answers_become_records_in_the_order_asked(house: House, trained: dict, tmp_path: Path) -> None:
    prompts, output = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    prompts.write_text("the lamp is broken\n\nwhere is my order 12?\nthe lamp is broken\n")
    code, answer, said = rehearse(trained["model"], prompts, output, "--max-tokens", "64")
    assert code == 0, said
    rows = [json.loads(line)["messages"] for line in output.read_text().splitlines()]
    assert (answer["prompts"], answer["records"]) == (3, len(rows))
    asked = [row[0]["content"] for row in rows]
    assert asked == [text for text in ("the lamp is broken", "where is my order 12?") if text in asked]
    assert all(row[1]["role"] == "assistant" and row[1]["content"] for row in rows)
    again = tmp_path / "again.jsonl"
    rehearse(trained["model"], prompts, again, "--max-tokens", "64")
    assert again.read_bytes() == output.read_bytes()


def test_half_a_sentence_is_no_record_and_nothing_is_no_file(house: House, trained: dict, tmp_path: Path) -> None:
    prompts, output = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    prompts.write_text("the lamp is broken\n")
    code, answer, _ = rehearse(trained["model"], prompts, output, "--max-tokens", "1")
    assert code == BadInput.exit_code
    assert "finished none of 1 answers" in answer["message"]
    assert not output.exists()
    prompts.write_text("\n")
    code, answer, _ = rehearse(trained["model"], prompts, output)
    assert (code, "no prompts" in answer["message"]) == (BadInput.exit_code, True)
