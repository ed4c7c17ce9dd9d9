"""Rows of any format become the same conversation, or say what is wrong with them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from corpus import record, tools
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


SEARCH = {"name": "search", "description": "Find things", "parameters": {"type": "object"}}
CALLED = '<tool_call>\n{"name": "search", "arguments": {"text": "退款"}}\n</tool_call>'


@pytest.mark.parametrize("arguments", [{"text": "退款"}, '{"text": "退款"}'])
def test_tool_calls_without_content_are_kept(arguments: Any) -> None:
    """datasets#8241: arguments come as a string or as an object."""
    function = {"name": "search", "arguments": arguments}
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    result = {"role": "tool", "content": "[]", "tool_call_id": "1"}
    row = {"messages": [HI[0], call, result, HI[1]], "tools": [{"type": "function", "function": SEARCH}]}
    messages = conversation(row, "auto", {})
    record.check(messages)
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert messages[0]["content"].startswith(tools.HEAD)
    assert json.dumps(SEARCH) in messages[0]["content"]
    assert messages[2] == {"role": "assistant", "content": CALLED}
    assert tools.is_call(CALLED)


def test_sharegpt_calls_and_observations_are_turns() -> None:
    turns = [
        {"from": "human", "value": "Hi"},
        {"from": "function_call", "value": '{"name": "search", "arguments": {"text": "退款"}}'},
        {"from": "observation", "value": {"found": []}}, {"from": "gpt", "value": "Nothing."},
    ]  # fmt: skip
    messages = conversation({"conversations": turns, "tools": json.dumps([SEARCH]), "system": "S"}, "auto", {})
    record.check(messages)
    assert messages[0]["content"].startswith(f"S\n\n{tools.HEAD}")
    assert [message["content"] for message in messages[2:]] == [CALLED, '{"found": []}', "Nothing."]
    assert conversation({"conversations": turns[:1], "tools": "[]"}, "auto", {})[0]["role"] == "user"


def test_what_is_said_before_a_call_stays_before_it() -> None:
    calls = [{"function": {"name": "a", "arguments": ""}}, {"function": {"name": "b", "arguments": {}}}]
    text = tools.call(calls, "Let me look.")
    assert text.startswith("Let me look.\n<tool_call>\n")
    assert text.count("<tool_call>") == 2


@pytest.mark.parametrize(
    ("calls", "why"),
    [("{", "not JSON"), ([{}], "no name"), ({"name": "a", "arguments": "["}, "arguments is not JSON"),
     ({"name": "a", "arguments": [1]}, "no JSON object"), ([], "no object"), ("3", "no object")],
)  # fmt: skip
def test_a_call_that_is_none_is_told(calls: Any, why: str) -> None:
    with pytest.raises(Bad, match=why):
        tools.call(calls)


def test_the_line_s_own_system_prompt_stands_before_tools_alone() -> None:
    assert tools.with_system("Be kind.", tools.system(None, [SEARCH])).startswith(f"Be kind.\n\n{tools.HEAD}")
    assert tools.with_system("Be kind.", tools.system("S", [SEARCH])).startswith("S")


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
        ({"chosen": "a", "rejected": "b"}, "preference: nothing is asked, the row has chosen, rejected"),
        ({"messages": [HI[0], {**HI[1], "name": "\udcb2"}]}, "a lone surrogate"),
        ({"messages": [HI[0], {**HI[1], "seen": 1 << 64}]}, "not to be written as JSON"),
        ({"messages": [HI[0], {**HI[1], "weight": 2}]}, "weight: 2 is no number from 0 to 1"),
        ({"messages": [HI[0], {**HI[1], "weight": True}]}, "weight: True"),
        ({"messages": [HI[0], {**HI[1], "weight": "0"}]}, "weight: '0'"),
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
    with pytest.raises(Bad, match="role order: tool after user"):
        record.check([{"role": role, "content": "x"} for role in ["user", "tool", "assistant"]])


@pytest.mark.parametrize(("question", "answer", "why"), [(" ", "x", "nothing is asked"), ("x", "\n", "is empty")])
def test_empty_turns_are_refused(question: str, answer: str, why: str) -> None:
    with pytest.raises(Bad, match=why):
        record.check([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])


def test_a_weight_is_kept_and_a_conversation_of_which_nothing_is_learnt_is_refused() -> None:
    row = {"messages": [HI[0], {**HI[1], "weight": 0}, HI[0], {**HI[1], "weight": 0.5}]}
    messages = conversation(row, "auto", {})
    assert [message.get("weight") for message in messages] == [None, 0, None, 0.5]
    record.check(messages)
    with pytest.raises(Bad, match="every answer has weight 0"):
        record.check(messages[:2])
