"""Evaluation texts are found in training files, however they were wrapped, cased, punctuated or embedded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corpus import cli, overlap
from corpus.shingles import Texts

QUESTION = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many clips "
    "did Natalia sell altogether in April and May?"
)
OTHER = "A robe takes 2 bolts of blue fiber and half that much white fiber. How many bolts in total does it take?"
CHINESE = "小明在四月卖给了四十八个朋友每人一个夹子，五月卖出的夹子是四月的一半，请问他一共卖了多少个夹子？"


def wrapped(text: str, words: int) -> str:
    parts = text.split()
    return "\n".join(" ".join(parts[at : at + words]) for at in range(0, len(parts), words))


class Command:
    """The command on files below a folder."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capsys = folder, capsys

    def write(self, name: str, rows: Any) -> Path:
        path = self.folder / name
        text = json.dumps(rows) if isinstance(rows, dict) else "".join(json.dumps(row) + "\n" for row in rows)
        path.write_text(text)
        return path

    def run(self, inputs: Path, against: Path, *more: str, code: int = 0) -> dict[str, Any]:
        self._capsys.readouterr()
        output = str(self.folder / "out")
        found = cli.main(["decontaminate", str(inputs), "--against", str(against), "--output", output, *more])
        answer: dict[str, Any] = json.loads(self._capsys.readouterr().out.splitlines()[-1])
        assert found == code, answer
        return answer

    def found(self) -> list[tuple[int, int]]:
        rows = pq.read_table(self.folder / "out" / "contaminated.parquet").to_pylist()
        return [(row["line"], row["evaluation_line"]) for row in rows]


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path, capsys)


def test_a_text_is_found_wherever_and_however_it_stands(command: Command) -> None:
    training = command.write("train.jsonl", [
        {"instruction": "Say hello.", "output": "Hello to you and to everybody who reads this"},
        {"instruction": wrapped(QUESTION, 8), "output": "72"},
        {"instruction": f"Solve this: {QUESTION.upper().replace(',', ' --')} Think!", "output": "72"},
        {"instruction": "Repeat a riddle.", "output": f"Here is one. {OTHER}"},
        {"messages": [{"role": "user", "content": CHINESE.replace("，", " ")}, {"role": "assistant", "content": "72"}]},
        {"instruction": "Natalia sold clips in April. How many?", "output": "some"},
    ])  # fmt: skip
    evaluation = command.write("eval.jsonl", [
        {"question": OTHER, "answer": "3"}, {"question": QUESTION, "answer": "72"},
        {"question": CHINESE, "answer": "72"}, {"question": "What is it?", "answer": "nothing"},
    ])  # fmt: skip
    answer = command.run(training, evaluation)
    assert command.found() == [(2, 2), (3, 2), (4, 1), (5, 3)]
    counts = {name: answer[name] for name in ("documents", "kept", "contaminated", "evaluation_texts", "too_short")}
    assert counts == {"documents": 6, "kept": 2, "contaminated": 4, "evaluation_texts": 4, "too_short": 1}
    kept = pq.read_table(command.folder / "out" / "kept.parquet").to_pylist()
    assert [row["line"] for row in kept] == [1, 6]


def test_half_a_question_is_no_contamination_unless_asked_for(command: Command) -> None:
    words = QUESTION.split()
    training = command.write("train.jsonl", [{"prompt": " ".join(words[: len(words) // 2 + 4]), "completion": "x"}])
    evaluation = command.write("eval.jsonl", [{"question": QUESTION, "answer": "72"}])
    assert command.run(training, evaluation)["contaminated"] == 0
    assert command.run(training, evaluation, "--threshold", "0.4")["contaminated"] == 1


def test_examples_in_one_json_object_are_rows(command: Command) -> None:
    """BIG-bench hard: one object with a list of examples."""
    training = command.write("train.jsonl", [{"instruction": OTHER, "output": "3"}])
    evaluation = command.write("eval.json", {"canary": "x", "examples": [{"input": QUESTION}, {"input": OTHER}]})
    command.run(training, evaluation)
    assert command.found() == [(1, 2)]


def test_what_cannot_be_compared_is_told(command: Command) -> None:
    some = command.write("a.jsonl", [{"question": QUESTION, "answer": "72"}])
    empty = command.write("b.jsonl", [])
    assert "no text that can be read" in command.run(some, empty, code=10)["message"]
    assert "there is no such file" in command.run(some, command.folder / "c", code=10)["message"]
    assert "--threshold is 2: " in command.run(some, some, "--threshold", "2", code=10)["message"]


WORDS = st.lists(st.sampled_from("one two three four five six seven".split()), max_size=14)  # noqa: SIM905


@given(texts=st.lists(WORDS, min_size=1, max_size=6), asked=st.lists(WORDS, min_size=1, max_size=4))
def test_shares_are_those_of_the_plain_twin(texts: list[list[str]], asked: list[list[str]]) -> None:
    """Of an evaluation text of fewer than n words the one gram of all of them."""
    n, least = 3, 2

    def grams(words: list[str], span: int) -> set[tuple[str, ...]]:
        return {tuple(words[at : at + span]) for at in range(len(words) - span + 1)}

    guarded = overlap.Guarded.of(Texts.of([" ".join(words) for words in asked]), n, least)
    found, share = overlap.held(Texts.of([" ".join(words) for words in texts]), guarded)
    for text, which, part in zip(texts, found, share, strict=True):
        shares = [
            len(own & grams(text, span)) / len(own) if own and len(words) >= least else 0.0
            for words in asked
            for span in [min(n, len(words))]
            for own in [grams(words, span)]
        ]
        assert part == pytest.approx(max(shares))
        assert which == (shares.index(max(shares)) if max(shares) else -1)
