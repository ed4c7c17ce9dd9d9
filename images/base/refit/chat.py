"""Chat rendering by the tokenizer's own template, cut into segments of which each is learnt from or not.

Masks follow segments, never the length of a rendered prefix: a template may rewrite earlier turns (marin#7237,
Megatron-Bridge#3359), and a prefix may tokenize differently than the same text inside the whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from refit.errors import BadInput

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Segment:
    """A stretch of rendered text; `learn` where the model should learn to write it."""

    text: str
    learn: bool


@dataclass(frozen=True)
class Template:
    """A chat template with the special tokens it may name."""

    source: str
    tokens: tuple[tuple[str, str], ...] = ()

    def render(self, messages: Sequence[Message], *, generation: bool = False) -> str:
        """The text of a conversation; with `generation`, opened for the assistant's next turn.

        Raises:
            BadInput: the template refuses the conversation (a role or an order it does not know).
        """
        try:
            return _compiled(self.source).render(
                messages=[dict(message) for message in messages], add_generation_prompt=generation, **dict(self.tokens)
            )
        except jinja2.TemplateError as error:
            raise BadInput(f"the chat template refuses the conversation: {error}") from error

    def segments(self, messages: Sequence[Message]) -> list[Segment]:
        """The whole conversation in segments; assistant contents with what ends them are learnt, the rest is not.

        Every assistant content is replaced by a mark that occurs nowhere else, the whole is rendered once, and the
        marks are found again: the template decides what stands around them, and whether they are there at all.

        Raises:
            BadInput: an assistant turn does not come out of the template as it went in.
        """
        marked, contents = [], []
        for message in messages:
            if message.get("role") == "assistant" and isinstance(message.get("content"), str) and message["content"]:
                contents.append(str(message["content"]).strip())
                marked.append({**message, "content": f"\ue000{len(contents)}\ue001"})
            else:
                marked.append(dict(message))
        text = self.render(marked)
        segments: list[Segment] = []
        for number, content in enumerate(contents, start=1):
            before, mark, text = text.partition(f"\ue000{number}\ue001")
            if not mark:
                raise BadInput(f"the chat template drops or rewrites assistant turn {number}")
            end, text = self._turn_end(text)
            segments += [Segment(before, False), Segment(content + end, True)]
        return [segment for segment in [*segments, Segment(text, False)] if segment.text]

    def _turn_end(self, text: str) -> tuple[str, str]:
        eos = dict(self.tokens).get("eos_token", "")
        return (eos, text[len(eos) :]) if eos and text.startswith(eos) else ("", text)


def load_template(folder: Path) -> Template:
    """The template of a tokenizer folder (chat_template.jinja, or inside tokenizer_config.json).

    Raises:
        BadInput: there is none; a base model needs one given before it can be taught conversations.
    """
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    file = folder / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    if not isinstance(source, str):
        raise BadInput(f"{folder}: the tokenizer has no chat template. Add a chat_template.jinja to the base model.")
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    values = {
        name: config[name]["content"] if isinstance(config.get(name), dict) else config.get(name) for name in names
    }
    return Template(source, tuple((name, value) for name, value in values.items() if isinstance(value, str)))


@cache
def _compiled(source: str) -> jinja2.Template:
    # The environment that tokenizers' templates are written for: trimmed blocks, loop controls, a sandbox.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now(UTC).strftime(form)
    environment.filters["tojson"] = lambda value, **kw: json.dumps(value, ensure_ascii=False, **kw)
    return environment.from_string(source)
