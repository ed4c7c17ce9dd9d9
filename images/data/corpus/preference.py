"""Preference pairs: one question, an answer that people preferred and one that they did not.

Two layouts are about. In the first the two answers stand beside the conversation (LLaMA-Factory's `conversations`, or
`messages`, `instruction` and `input`, `prompt`); in the second `chosen` and `rejected` are whole conversations that
differ in their last answer alone (UltraFeedback; HH-RLHF writes each as one text with Human: and Assistant:).

Either way a pair is read as two ordinary conversations, so that roles, tools, system messages and histories mean what
they mean everywhere. It becomes one: the conversation that ends with the chosen answer, whose last message carries the
other one's text under `rejected`:

    {"role": "assistant", "content": "what was preferred", "rejected": "what was not"}

so that whoever reads conversations reads pairs too, and trains on the chosen answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from corpus.record import REJECTED, Bad, Message

Row = Mapping[str, Any]
Columns = Mapping[str, str]
Formats = Mapping[str, Callable[[Row, Columns], list[Message]]]

SIDES = ("chosen", "rejected")
_ANSWERERS = ("gpt", "assistant", "function_call")
_HH_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):")
_HH_ROLES = {"Human": "user", "Assistant": "assistant"}


def messages(row: Row, columns: Columns, formats: Formats) -> list[Message]:
    """The canonical form of a pair.

    Args:
        row: has `chosen` and `rejected`, in either layout.
        columns: our names (chosen, rejected, prompt) to theirs.
        formats: how ordinary rows are read, by format.

    Raises:
        Bad: not a pair, an answer is missing or empty, the two conversations part before their last answer, or the
            answers are the same.
    """
    chosen, rejected = (_side(row, side, columns, formats) for side in SIDES)
    for side, said in zip(SIDES, (chosen, rejected), strict=True):
        if said[-1]["role"] != "assistant":
            raise Bad(f"preference: {side} ends with a turn of the {said[-1]['role']}, not with an answer")
        if not said[-1]["content"].strip():
            raise Bad(f"preference: the {side} answer is empty")
    if chosen[:-1] != rejected[:-1]:
        raise Bad("preference: chosen and rejected part before their last answer; only that may differ")
    if chosen[-1]["content"].strip() == rejected[-1]["content"].strip():
        raise Bad("preference: nothing to prefer, chosen and rejected say the same")
    return [*chosen[:-1], {**chosen[-1], REJECTED: rejected[-1]["content"]}]


def _side(row: Row, side: str, columns: Columns, formats: Formats) -> list[Message]:
    """The conversation that ends with one of the two answers."""
    answer = row.get(columns.get(side, side))
    if answer is None or answer == []:
        raise Bad(f"preference: no {side}")
    if isinstance(answer, str) and _HH_TURN.match(answer):
        return _hh(answer)
    turns = answer if isinstance(answer, list) else [_turn(answer, side)]
    asked = row.get(columns.get("prompt", "prompt"))
    if _speaker(turns[0]) not in _ANSWERERS:  # whole conversations; what else the row has says it once more
        return _read(turns, row, columns, formats)
    for before in (row.get("conversations"), row.get("messages"), asked):
        if isinstance(before, list):
            return _read([*before, *turns], row, columns, formats)
    text = _content(turns[0], side)
    if "instruction" in row:
        return formats["alpaca"]({**row, "output": text}, columns)
    if isinstance(asked, str):
        completion = columns.get("completion", "completion")
        before = [{"role": "system", "content": row["system"]}] if isinstance(row.get("system"), str) else []
        return [*before, *formats["prompt"]({**row, completion: text}, columns)]
    raise Bad(f"preference: nothing is asked, the row has {', '.join(sorted(map(str, row))[:8])}")


def _read(turns: list[Any], row: Row, columns: Columns, formats: Formats) -> list[Message]:
    """A conversation whose turns may be in ShareGPT's words (from, value) or in OpenAI's (role, content)."""
    if any(isinstance(turn, Mapping) and "from" in turn for turn in turns):
        return formats["sharegpt"]({**row, "conversations": [_in_sharegpt(turn) for turn in turns]}, columns)
    return formats["messages"]({**row, "messages": turns}, columns)


def _turn(answer: Any, side: str) -> Any:
    if isinstance(answer, str):
        return {"role": "assistant", "content": answer}
    if isinstance(answer, Mapping):
        return answer
    raise Bad(f"preference: {side} is neither a text, nor a turn, nor a list of turns")


def _in_sharegpt(turn: Any) -> Any:
    if isinstance(turn, Mapping) and "from" not in turn and "role" in turn:
        return {"from": turn["role"], "value": turn.get("content")}
    return turn


def _content(turn: Any, side: str) -> str:
    """The text of an answer that stands alone."""
    turn = _in_sharegpt(turn)
    if not isinstance(turn.get("value"), str):
        raise Bad(f"preference: {side} has no text")
    return str(turn["value"])


def _speaker(turn: Any) -> Any:
    turn = _in_sharegpt(turn)
    return turn.get("from") if isinstance(turn, Mapping) else None


def _hh(text: str) -> list[Message]:
    """HH-RLHF's one text: turns that begin with Human: or Assistant: after an empty line."""
    _, *parts = _HH_TURN.split(text)
    said = zip(parts[::2], parts[1::2], strict=True)
    return [{"role": _HH_ROLES[who], "content": words.strip()} for who, words in said]
