"""Preference pairs in every layout become one conversation that also knows the answer that was not preferred."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from corpus import record
from corpus.formats import conversation
from corpus.record import Bad

if TYPE_CHECKING:
    from tests.data.conftest import Line

ASKED = {"role": "user", "content": "你好"}
PAIR = [ASKED, {"role": "assistant", "content": "您好！", "rejected": "走开"}]
GOOD, POOR = {"role": "assistant", "content": "您好！"}, {"role": "assistant", "content": "走开"}
FROM_GOOD, FROM_POOR = {"from": "gpt", "value": "您好！"}, {"from": "gpt", "value": "走开"}
FROM_ASKED = {"from": "human", "value": "你好"}


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [FROM_ASKED], "chosen": FROM_GOOD, "rejected": FROM_POOR},
        {"conversations": [FROM_ASKED], "chosen": GOOD, "rejected": POOR},
        {"conversations": [FROM_ASKED], "chosen": "您好！", "rejected": "走开"},
        {"messages": [ASKED], "chosen": GOOD, "rejected": POOR},
        {"messages": [ASKED], "chosen": [FROM_GOOD], "rejected": [FROM_POOR]},
        {"instruction": "你好", "input": "", "chosen": "您好！", "rejected": "走开"},
        {"instruction": "", "input": "你好", "chosen": GOOD, "rejected": FROM_POOR},
        {"prompt": "你好", "chosen": "您好！", "rejected": "走开"},
        {"prompt": "你好", "chosen": [GOOD], "rejected": [POOR]},
        {"prompt": [ASKED], "chosen": [GOOD], "rejected": [POOR]},
        {"chosen": [ASKED, GOOD], "rejected": [ASKED, POOR]},
        {"chosen": [FROM_ASKED, FROM_GOOD], "rejected": [FROM_ASKED, FROM_POOR], "score_chosen": 8.5},
        {"prompt": "你好", "messages": [ASKED, GOOD], "chosen": [ASKED, GOOD], "rejected": [ASKED, POOR]},
        {"chosen": "\n\nHuman: 你好\n\nAssistant: 您好！", "rejected": "\n\nHuman: 你好\n\nAssistant: 走开"},
    ],
    ids=lambda row: "+".join(row),
)
def test_every_layout_is_told_by_its_keys_and_means_the_same(row: dict[str, Any]) -> None:
    messages = conversation(row, "auto", {})
    assert messages == PAIR == conversation(row, "preference", {})
    record.check(messages)


def test_columns_system_and_history_count_as_in_other_formats() -> None:
    row = {"q": "Hi", "good": "Hello", "bad": "No", "system": "S"}
    messages = conversation(row, "auto", {"prompt": "q", "chosen": "good", "rejected": "bad"})
    assert [message["content"] for message in messages] == ["S", "Hi", "Hello"]
    row = {"instruction": "C", "history": [["A", "B"]], "system": "S", "chosen": "D", "rejected": "E"}
    assert [message["content"] for message in conversation(row, "auto", {})] == ["S", "A", "B", "C", "D"]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "x", "chosen": "a", "rejected": " a\n"}, "nothing to prefer"),
        ({"prompt": "x", "chosen": "a", "rejected": None}, "no rejected"),
        ({"prompt": "x", "chosen": [], "rejected": "b"}, "no chosen"),
        ({"prompt": "x", "chosen": "a", "rejected": " "}, "the rejected answer is empty"),
        ({"prompt": "x", "chosen": "", "rejected": "b"}, "the chosen answer is empty"),
        ({"prompt": "x", "chosen": 1, "rejected": "b"}, "chosen is neither a text"),
        ({"messages": [ASKED], "chosen": GOOD, "rejected": ASKED}, "rejected ends with a turn of the user"),
        ({"chosen": [ASKED, GOOD], "rejected": [ASKED]}, "rejected ends with a turn of the user"),
        ({"chosen": [ASKED, GOOD], "rejected": [{**ASKED, "content": "嗨"}, POOR]}, "part before their last answer"),
        ({"chosen": [ASKED, GOOD], "rejected": [ASKED, GOOD, ASKED, POOR]}, "part before their last answer"),
        ({"chosen": [ASKED, {"role": "assistant"}], "rejected": [ASKED, POOR]}, "a message without content"),
        ({"conversations": [{"from": "martian", "value": "x"}], "chosen": "a", "rejected": "b"}, "unknown role"),
        ({"chosen": ["x"], "rejected": ["y"]}, "a message without a role"),
        ({"prompt": "x", "chosen": "a", "rejected": "\udcb2"}, "a lone surrogate"),
    ],
)
def test_what_is_no_pair_is_told(row: dict[str, Any], why: str) -> None:
    with pytest.raises(Bad, match=why):
        conversation(row, "auto", {})


def test_a_rejected_answer_may_be_as_bad_as_it_is_and_holds_no_secret(small: Line) -> None:
    """Why it was rejected is what is to be learnt; the chosen one is judged as any answer."""
    again, key = "buy now and save money today " * 20, "my key is AKIAQQQQQQQQQQQQQQQQ for this"
    answers = [("fine", again), (again, "poor"), ("fine", key)]
    pairs = [{"prompt": f"question {n}", "chosen": a, "rejected": b} for n, (a, b) in enumerate(answers)]
    small.data.update(label_key=None, rules=["repeats", "secrets"], max_bad_ratio=0.5)
    small.deliver("pairs", pairs)
    bad = [row for row in small.rows(small.dataset(), "quarantine.parquet") if row["source"] == "pairs"]
    assert [(row["line"], row["reason"].partition(":")[0]) for row in bad] == [(2, "repeats"), (3, "secrets")]
