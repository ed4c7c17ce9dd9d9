"""Rows of any format become the same conversation, or say what is wrong with them."""

from __future__ import annotations

from typing import Any

import pytest

from corpus import record
from corpus.formats import conversation
from corpus.record import Bad

HI = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"instruction": "Hi", "input": "", "output": "Hello"}, {}),
        ({"messages": HI}, {}),
        ({"messages": '[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]'}, {}),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, HI[1]]}, {}),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}, {}),
        ({"prompt": "Hi", "completion": "Hello"}, {}),
        ({"q": "Hi", "a": "Hello"}, {"prompt": "q", "completion": "a"}),
    ],
)
def test_every_format_is_told_by_its_keys_and_means_the_same(row: dict[str, Any], columns: dict[str, str]) -> None:
    assert conversation(row, "auto", columns) == HI


def test_alpaca_joins_input_and_puts_system_and_history_in_front() -> None:
    row = {"instruction": "Add", "input": "1 2", "output": "3", "system": "S", "history": [["Hi", "Hello"]]}
    messages = conversation(row, "alpaca", {})
    assert [message["content"] for message in messages] == ["S", "Hi", "Hello", "Add\n1 2", "3"]


def test_text_is_a_message_of_its_own_kind() -> None:
    assert conversation("once upon a time\n", "auto", {}) == [{"role": "text", "content": "once upon a time"}]


def test_tool_calls_without_content_are_kept() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]}
    messages = conversation({"messages": [HI[0], call]}, "auto", {})
    assert messages[1] == {**call, "content": ""}
    record.check(messages)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (["Hi"], "not an object: the row is a list"),
        ({"x": 1, "y": 2}, "unknown format: the row has x, y"),
        ({"prompt": "Hi"}, "unknown format"),
        ({"instruction": None, "output": "x"}, "no instruction"),
        ({"messages": []}, "no messages"),
        ({"messages": [{"content": "Hi"}]}, "a message without a role"),
        ({"messages": [{"role": "user"}]}, "a message without content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "a list, not text"),
        ({"conversations": [{"from": "martian", "value": "Hi"}]}, "unknown role: martian"),
        ({"chosen": "a", "rejected": "b"}, "preference pairs"),
        ({"prompt": "\udcb2", "completion": "x"}, "a lone surrogate"),
    ],
)
def test_what_is_wrong_is_said(row: Any, why: str) -> None:
    with pytest.raises(Bad, match=why):
        conversation(row, "auto", {})


@pytest.mark.parametrize(
    ("roles", "why"),
    [
        ("user", "ends with user"),
        ("user assistant tool", "ends with tool"),
        ("user user assistant", "role order: user after user"),
        ("assistant", "role order: assistant after start"),
        ("user system assistant", "role order: system after user"),
        ("user narrator assistant", "unknown role: narrator"),
        ("system", "ends with nothing"),
    ],
)
def test_conversations_that_no_template_knows_are_refused(roles: str, why: str) -> None:
    with pytest.raises(Bad, match=why):
        record.check([{"role": role, "content": "x"} for role in roles.split()])


def test_tools_between_question_and_answer_are_in_order() -> None:
    roles = ["system", "user", "assistant", "tool", "tool", "assistant"]
    record.check([{"role": role, "content": "x"} for role in roles])


@pytest.mark.parametrize(("question", "answer", "why"), [(" ", "x", "nothing is asked"), ("x", "\n", "is empty")])
def test_empty_turns_are_refused(question: str, answer: str, why: str) -> None:
    with pytest.raises(Bad, match=why):
        record.check([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])
