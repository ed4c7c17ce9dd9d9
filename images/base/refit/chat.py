"""Chat rendering by the tokenizer's own template, cut into segments of which each is learnt from or not.

Masks follow segments, never the length of a rendered prefix: a template may rewrite earlier turns (marin#7237,
Megatron-Bridge#3359), and a prefix may tokenize differently than the same text inside the whole.

How: every content is replaced by a mark that occurs nowhere else, the skeleton is rendered, and the marks are found
again; the template decides what stands around them. With the contents put back the text must equal what the template
renders of the true conversation, character by character. Where it does not (the template looks into the contents),
only the last answer is learnt, in the surroundings that the template gives it.

A template that is proved never to look into the contents (`refit.blind`) needs no such comparison: `Template.plan`
gives the segments of all conversations with the same roles at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import jinja2

from refit.blind import is_blind
from refit.errors import BadInput
from refit.sandbox import compiled, environment

Message = Mapping[str, Any]
Piece = tuple[str, int | None]  # text, and the number of the message whose content it is (None: the template's own)

_OURS = frozenset({"weight", "rejected"})
"""Keys of a message that are for training, and of which a template is told nothing."""

_MARK = re.compile("\ue000([0-9]+)\ue001")
_PADDED = re.compile("\x1f\ue000([0-9]+)\ue001\x1f")


@dataclass(frozen=True)
class Segment:
    """A stretch of rendered text.

    `answer` where the model should learn to write it: the number of the message that it belongs to. `special` where it
    is one special token that the template wrote; the same characters inside a message are plain text and must be
    tokenized as such.
    """

    text: str
    answer: int | None = None
    special: bool = False


@dataclass(frozen=True)
class Stretch:
    """A segment of every conversation with the same roles: literal text, and the numbers of messages said there.

    Of N messages number n is said as it is, number N + n without blanks around it.
    """

    parts: tuple[str | int, ...]
    answer: int | None = None
    special: bool = False


@dataclass(frozen=True)
class Template:
    """A chat template with the special tokens it may name, and all special tokens of its tokenizer."""

    source: str
    tokens: tuple[tuple[str, str], ...] = ()
    specials: tuple[str, ...] = ()

    @property
    def eos(self) -> str:
        """The token that ends an answer; empty where the tokenizer names none."""
        return dict(self.tokens).get("eos_token", "")

    def render(self, messages: Sequence[Message], *, generation: bool = False) -> str:
        """The text of a conversation; with `generation`, opened for the assistant's next turn.

        Raises:
            BadInput: the template refuses the conversation (a role or an order it does not know).
        """
        try:
            return compiled(self.source).render(
                messages=[_shown(message) for message in messages],
                add_generation_prompt=generation,
                **dict(self.tokens),
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise BadInput(f"the chat template refuses the conversation: {error}") from error

    def segments(self, messages: Sequence[Message]) -> list[Segment]:
        """The whole conversation in segments: answers with what ends them are learnt, the rest is not.

        An answer of `weight` 0 is not learnt either (OpenAI's fine-tuning format); how much the others count is to be
        read from the message that a segment names. Of a preference pair (`rejected`) the chosen answer is rendered.

        Raises:
            BadInput: the template refuses the conversation, the last answer cannot be found in what it renders, or
                every answer has weight 0.
        """
        if not any(map(_is_learnt, messages)) and any(message.get("role") == "assistant" for message in messages):
            raise BadInput("nothing to learn: every answer has weight 0")
        if any(_MARK.search(str(message.get("content"))) for message in messages):
            raise BadInput("a message contains the marks that rendering needs (U+E000, digits, U+E001)")
        truth = self.render(messages)
        everywhere = frozenset(range(len(messages)))
        prompts = frozenset(n for n in everywhere if messages[n].get("role") != "assistant")
        for marked in (everywhere, prompts):
            for change in (_as_it_is, str.strip):  # some templates trim every content
                whole, opened = self._skeletons(messages, marked)
                pieces = _fill(whole, messages, change)
                if "".join(text for text, _ in pieces) != truth:
                    continue
                if marked == everywhere:
                    return self._answers(_lead(pieces, whole, opened), messages)
                if whole.startswith(opened) and _is_learnt(messages[-1]):
                    before = _fill(opened, messages, change)
                    return self._last_answer(before, whole[len(opened) :], len(messages) - 1)
        raise BadInput("the chat template rewrites the conversation, so that its answers cannot be found again")

    def plan(self, roles: tuple[str, ...]) -> tuple[Stretch, ...] | None:
        """What `segments` gives for conversations of these roles, contents left open; None where only it can say.

        It holds for messages with nothing but role, content and a weight that is not 0, every content a string that is
        not empty (and not blank where it is trimmed), and needs no rendering: the template is proved to ask nothing
        about contents.
        """
        return _plan(self, roles)

    def _skeletons(self, messages: Sequence[Message], marked: frozenset[int]) -> tuple[str, str]:
        """The rendered conversation with marks for contents, and how it opens for its last turn."""
        if len(marked) == len(messages) and all(message.keys() - _OURS == {"role", "content"} for message in messages):
            return _plain_skeletons(self, tuple(str(message["role"]) for message in messages))
        marks = [_marked(message, n) if n in marked else message for n, message in enumerate(messages)]
        return self.render(marks), self.render(marks[:-1], generation=True)

    def _answers(self, pieces: Sequence[Piece], messages: Sequence[Message]) -> list[Segment]:
        """Segments where every assistant content is learnt, with the special token that ends it."""
        answers = [at for at, (_, n) in enumerate(pieces) if n is not None and messages[n].get("role") == "assistant"]
        learnt = {at: pieces[at][1] for at in answers if _is_learnt(messages[pieces[at][1] or 0])}
        tail = "".join(text for text, _ in pieces[answers[-1] + 1 :]) if answers else ""
        end = self._special_at(tail)
        segments: list[Segment] = []
        for at, (text, number) in enumerate(pieces):
            if number is not None:
                segments.append(Segment(text, learnt.get(at)))
                continue
            if end and at - 1 in learnt and text.startswith(end):
                segments.append(Segment(end, learnt[at - 1], True))
                text = text[len(end) :]
            segments += self._literal(text)
        if answers and not tail.strip() and self.eos:
            # Nothing ends the conversation: without this the model would never learn to stop.
            segments.append(Segment(self.eos, learnt.get(answers[-1]), True))
        return _joined(segments)

    def _last_answer(self, before: Sequence[Piece], answer: str, number: int) -> list[Segment]:
        """Segments where only the end is learnt: the model writes it from the opened turn on, and what ends it."""
        segments: list[Segment] = []
        for text, said in before:
            segments += [Segment(text)] if said is not None else self._literal(text)
        ends = [answer.find(special) for special in self._all_specials() if special in answer]
        text, rest = (answer[: min(ends)], answer[min(ends) :]) if ends else (answer, "")
        end = self._special_at(rest) or self.eos
        closing = [Segment(end, number, True)] if end else []
        return _joined([*segments, Segment(text, number), *closing, *self._literal(rest.removeprefix(end))])

    def _literal(self, text: str) -> list[Segment]:
        """The template's own text, with its special tokens in segments of their own."""
        specials = self._all_specials()
        if not specials:
            return [Segment(text)]
        parts = re.split("(" + "|".join(map(re.escape, specials)) + ")", text)
        return [Segment(part, special=at % 2 == 1) for at, part in enumerate(parts)]

    def _special_at(self, text: str) -> str:
        return next((special for special in self._all_specials() if text.startswith(special)), "")

    def _all_specials(self) -> list[str]:
        return sorted({*self.specials, *(token for _, token in self.tokens)} - {""}, key=len, reverse=True)


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
    tokens = tuple((name, value) for name, value in values.items() if isinstance(value, str))
    return Template(source, tokens, _special_tokens(folder / "tokenizer.json"))


def _special_tokens(file: Path) -> tuple[str, ...]:
    added = json.loads(file.read_text(encoding="utf-8")).get("added_tokens", []) if file.is_file() else []
    return tuple(token["content"] for token in added if token.get("special"))


def _is_learnt(message: Message) -> bool:
    return message.get("role") == "assistant" and message.get("weight") != 0


def _shown(message: Message) -> dict[str, Any]:
    """What a template sees of a message."""
    return {key: value for key, value in message.items() if key not in _OURS}


def _as_it_is(text: str) -> str:
    return text


def _marked(message: Message, number: int) -> Message:
    return {**message, "content": f"\ue000{number}\ue001"} if isinstance(message.get("content"), str) else message


@lru_cache(maxsize=256)
def _plain_skeletons(template: Template, roles: tuple[str, ...]) -> tuple[str, str]:
    """The skeletons follow from the roles alone where messages have nothing but role and content."""
    marks = [_marked({"role": role, "content": ""}, n) for n, role in enumerate(roles)]
    return template.render(marks), template.render(marks[:-1], generation=True)


@lru_cache(maxsize=4096)
def _plan(template: Template, roles: tuple[str, ...]) -> tuple[Stretch, ...] | None:
    said = "".join((template.source, *roles, *(token for _, token in template.tokens)))
    if roles[-1:] != ("assistant",) or {*said} & {"\ue000", "\x1f"} or not _blind(template.source):
        return None
    # A blank around each mark tells where the template trims.
    padded = [{"role": role, "content": f"\x1f\ue000{n}\ue001\x1f"} for n, role in enumerate(roles)]
    try:
        whole, opened = template.render(padded), template.render(padded[:-1], generation=True)
    except BadInput:
        return None  # `segments` says why
    whole, opened = _numbered(whole, len(roles)), _numbered(opened, len(roles))
    marked = [_marked({"role": role, "content": ""}, n) for n, role in enumerate(roles * 2)]
    segments = template._answers(_lead(_fill(whole, marked, _as_it_is), whole, opened), marked)
    own = [None if segment.answer is None else segment.answer % len(roles) for segment in segments]
    return tuple(
        Stretch(_parts(segment.text), answer, segment.special) for segment, answer in zip(segments, own, strict=True)
    )


def _numbered(skeleton: str, count: int) -> str:
    """A skeleton in which message n is marked as n where it is said as it is, and as n + count where it is trimmed."""
    trimmed = _MARK.sub(lambda mark: f"\ue000{int(mark[1]) + count}\ue001", skeleton)
    return _PADDED.sub(lambda mark: f"\ue000{int(mark[1]) - count}\ue001", trimmed)


def _parts(text: str) -> tuple[str | int, ...]:
    parts = [int(part) if at % 2 else part for at, part in enumerate(_MARK.split(text))]
    return tuple(part for part in parts if part != "")


def _fill(skeleton: str, messages: Sequence[Message], change: Callable[[str], str]) -> list[Piece]:
    """A skeleton with its contents put back, in pieces."""
    pieces: list[Piece] = []
    for at, part in enumerate(_MARK.split(skeleton)):
        if at % 2:
            pieces.append((change(str(messages[int(part)]["content"])), int(part)))
        elif part:
            pieces.append((part, None))
    return pieces


def _lead(pieces: list[Piece], whole: str, opened: str) -> list[Piece]:
    """Pieces in which the last answer begins where the model begins to write.

    A template may put text of its own between the opened turn and the answer (Qwen3's empty thoughts): the model has
    to write that too, so it becomes part of the answer.
    """
    at = max((at for at, (_, number) in enumerate(pieces) if number is not None), default=None)
    if at is None or at == 0 or pieces[at - 1][1] is not None or not whole.startswith(opened):
        return pieces
    mark = whole.rfind("\ue000")
    written = whole[len(opened) : mark] if len(opened) <= mark else ""
    if not written or _MARK.search(written):
        return pieces
    before, (text, number) = pieces[at - 1][0].removesuffix(written), pieces[at]
    return [*pieces[: at - 1], *([(before, None)] if before else []), (written + text, number), *pieces[at + 1 :]]


def _joined(segments: Sequence[Segment]) -> list[Segment]:
    """Neighbours of one kind made one: they are tokenized together, as they are when the model is served."""
    joined: list[Segment] = []
    for segment in segments:
        before = joined[-1] if joined else None
        if not segment.text:
            continue
        if before and not before.special and not segment.special and before.answer == segment.answer:
            joined[-1] = Segment(before.text + segment.text, segment.answer)
        else:
            joined.append(segment)
    return joined


@cache
def _blind(source: str) -> bool:
    return is_blind(environment().parse(source))
