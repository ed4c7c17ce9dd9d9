"""Conversations with tools, as text: what may be called goes into the system message, a call is an answer.

Deliveries write calls in many ways and few chat templates know any of them. Here they become the form that Qwen and
Hermes models use and that vLLM's `hermes` parser reads back (`--tool-call-parser hermes`):

    <tool_call>
    {"name": "search", "arguments": {"text": "lamp"}}
    </tool_call>

so that a call is learnt, counted and masked like any other answer, whatever the template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from corpus.record import Bad

HEAD = "You may call tools. Their signatures, one JSON object a line:\n<tools>\n"
FOOT = (
    "\n</tools>\nTo call one, answer with a JSON object of its name and arguments:\n"
    '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
)
CALL, CALLED = "<tool_call>\n", "\n</tool_call>"


def is_call(content: str) -> bool:
    """Whether an answer calls a tool: such text is a program's, and is not cleaned as a person's."""
    return CALL in content and content.rstrip().endswith(CALLED.strip())


def system(own: str | None, tools: Any) -> str:
    """The system message of a conversation that may call `tools` (a list, or JSON of one), after its own if it has one.

    Raises:
        Bad: they are not a list of objects with a name.
    """
    found = parsed(tools, "tools")
    found = [found] if isinstance(found, Mapping) else found
    if not isinstance(found, list) or not found:
        raise Bad("tools: they are not a list of tools")
    lines = []
    for tool in found:
        tool = tool.get("function", tool) if isinstance(tool, Mapping) else tool
        if not isinstance(tool, Mapping) or not isinstance(tool.get("name"), str):
            raise Bad("tools: one has no name")
        lines.append(dumped(tool))
    text = HEAD + "\n".join(lines) + FOOT
    return f"{own}\n\n{text}" if own else text


def with_system(given: str, content: str) -> str:
    """A system message that has only tools, with the line's own system prompt before them; any other as it is."""
    return f"{given}\n\n{content}" if content.startswith(HEAD) else content


def call(calls: Any, content: str = "") -> str:
    """An answer that calls: `calls` is a call or several, as objects or as JSON; `content` is what is said first.

    Raises:
        Bad: a call has no name, or arguments that are no JSON object.
    """
    found = parsed(calls, "a call")
    found = [found] if isinstance(found, Mapping) else found
    if not isinstance(found, Sequence) or isinstance(found, str) or not found:
        raise Bad("tools: a call is no object")
    texts = [CALL + dumped(_call(one)) + CALLED for one in found]
    return "\n".join(([content] if content.strip() else []) + texts)


def _call(one: Any) -> dict[str, Any]:
    one = one.get("function", one) if isinstance(one, Mapping) else one
    if not isinstance(one, Mapping) or not isinstance(one.get("name"), str) or not one["name"]:
        raise Bad("tools: a call has no name")
    arguments = one.get("arguments", one.get("parameters"))
    arguments = {} if arguments in (None, "") else parsed(arguments, "a call's arguments")
    if not isinstance(arguments, Mapping):
        raise Bad("tools: a call's arguments are no JSON object")
    return {"name": one["name"], "arguments": arguments}


def parsed(value: Any, what: str) -> Any:
    """What JSON text says; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise Bad(f"tools: {what} is not JSON") from error


def dumped(value: Any) -> str:
    """An object on one line."""
    return json.dumps(value, ensure_ascii=False)
