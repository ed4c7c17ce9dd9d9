"""Rows to conversations: one small function a format, from a row to canonical messages.

A format that a row does not have is `Bad`, with what was expected and what the row has instead.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from corpus import preference, tools
from corpus.record import TEXT, WEIGHT, Bad, Message, dump

Row = Mapping[str, Any]
Columns = Mapping[str, str]

_READ = ("role", "content", "tool_calls")
_SPEAKERS = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system",
    "observation": "tool", "tool": "tool", "function_call": "function_call",
}  # fmt: skip


def conversation(row: Any, format: str, columns: Columns) -> list[Message]:
    """The canonical messages of a row.

    Args:
        row: what the file holds: a mapping, or a string of a plain text.
        format: one of `FORMATS`, or "auto" to tell by the row's keys.
        columns: our names (prompt, completion, text, chosen, rejected) to theirs.

    Raises:
        Bad: the row is not of that format, or holds what a record cannot.
    """
    if isinstance(row, str):
        row = {columns.get("text", "text"): row.rstrip("\r\n")}
    if not isinstance(row, Mapping):
        raise Bad(f"not an object: the row is {_kind(row)}")
    messages = FORMATS[_told_by_keys(row, columns) if format == "auto" else format](row, columns)
    dump(messages)
    return messages


def _told_by_keys(row: Row, columns: Columns) -> str:
    for format, keys in _KEYS.items():
        if all(columns.get(key, key) in row for key in keys):
            return format
    raise Bad(f"unknown format: the row has {_keys(row)}")


def _alpaca(row: Row, columns: Columns) -> list[Message]:
    instruction, given = _text(row, "instruction"), _text(row, "input", "")
    messages = [_message("system", row["system"])] if row.get("system") else []
    for turn in row.get("history") or []:
        if not isinstance(turn, list | tuple) or len(turn) != 2:
            raise Bad("history is not a list of pairs")
        messages += [_message("user", turn[0]), _message("assistant", turn[1])]
    asked = f"{instruction}\n{given}" if instruction and given else instruction or given
    return [*messages, _message("user", asked), _message("assistant", _text(row, "output"))]


def _messages(row: Row, columns: Columns) -> list[Message]:
    turns = row.get("messages")
    if isinstance(turns, str):  # a column of JSON
        turns = _json(turns, "messages")
    if not isinstance(turns, list) or not turns:
        raise Bad(f"no messages: the row has {_keys(row)}")
    messages = []
    for turn in turns:
        if not isinstance(turn, Mapping) or not isinstance(turn.get("role"), str):
            raise Bad("a message without a role")
        extra = {key: value for key, value in turn.items() if key not in _READ and value is not None}
        if WEIGHT in extra:
            extra[WEIGHT] = _weight(extra[WEIGHT])
        content = _content(turn.get("content"))
        if turn.get("tool_calls"):
            content = tools.call(turn["tool_calls"], content or "")
        elif content is None:
            raise Bad("a message without content")
        messages.append({"role": turn["role"], "content": content, **extra})
    return _with_tools(messages, row)


def _sharegpt(row: Row, columns: Columns) -> list[Message]:
    turns = row.get("conversations")
    if not isinstance(turns, list) or not turns:
        raise Bad(f"no conversations: the row has {_keys(row)}")
    messages = [_message("system", row["system"])] if row.get("system") else []
    for turn in turns:
        if not isinstance(turn, Mapping) or "value" not in turn:
            raise Bad("a turn without from and value")
        role = _SPEAKERS.get(str(turn.get("from")))
        if role is None:
            raise Bad(f"unknown role: {turn.get('from')}")
        value = turn["value"]
        if role == "function_call":
            messages.append(_message("assistant", tools.call(value)))
        else:
            is_result = role == "tool" and not isinstance(value, str)
            messages.append(_message(role, tools.dumped(value) if is_result else value))
    return _with_tools(messages, row)


def _with_tools(messages: list[Message], row: Row) -> list[Message]:
    """The conversation with the tools that its row names in its system message."""
    if not row.get("tools") or row["tools"] == "[]":
        return messages
    own = messages[0]["content"] if messages[0]["role"] == "system" else None
    return [_message("system", tools.system(own, row["tools"])), *messages[own is not None :]]


def _prompt(row: Row, columns: Columns) -> list[Message]:
    asked = _text(row, columns.get("prompt", "prompt"))
    return [_message("user", asked), _message("assistant", _text(row, columns.get("completion", "completion")))]


def _plain(row: Row, columns: Columns) -> list[Message]:
    return [_message(TEXT, _text(row, columns.get("text", "text")))]


def _preference(row: Row, columns: Columns) -> list[Message]:
    return preference.messages(row, columns, FORMATS)


FORMATS: dict[str, Callable[[Row, Columns], list[Message]]] = {
    "alpaca": _alpaca, "messages": _messages, "sharegpt": _sharegpt, "prompt": _prompt, "text": _plain,
    "preference": _preference,
}  # fmt: skip
_KEYS = {
    "preference": ("chosen", "rejected"), "messages": ("messages",), "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"), "prompt": ("prompt", "completion"), "text": ("text",),
}  # fmt: skip


def _message(role: str, content: Any) -> Message:
    if not isinstance(content, str):
        raise Bad(f"the content of a turn is {_kind(content)}, not text")
    return {"role": role, "content": content}


def _content(content: Any) -> str | None:
    """Text, or the text parts of a list of parts (OpenAI's form)."""
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    raise Bad(f"the content of a turn is {_kind(content)}, not text")


def _weight(weight: Any) -> float:
    """How much an answer counts in the loss, from 0 (not learnt from) to 1."""
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= 1:
        raise Bad(f"weight: {weight!r} is no number from 0 to 1")
    return weight


def _text(row: Row, key: str, default: str | None = None) -> str:
    value = row.get(key)
    if value is None:
        if default is not None:
            return default
        raise Bad(f"no {key}: the row has {_keys(row)}")
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False)  # an answer given as JSON itself
    return value if isinstance(value, str) else str(value)


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise Bad(f"{what} is not JSON") from error


def _keys(row: Row) -> str:
    return ", ".join(sorted(map(str, row))[:8]) or "no columns"


def _kind(value: Any) -> str:
    return {"NoneType": "nothing", "dict": "an object", "list": "a list", "str": "a text"}.get(
        type(value).__name__, f"a {type(value).__name__}"
    )
