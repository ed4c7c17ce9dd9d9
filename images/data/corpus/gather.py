"""The segments of many conversations, gathered: what has to be tokenized, and which conversation says it where."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from corpus.bpe import Ids
from corpus.record import TEXT, WEIGHT, Message
from corpus.slots import Shape
from refit.chat import Segment, Stretch, Template
from refit.errors import BadInput
from refit.packed import mask_of

UNKNOWN_SPECIAL = "the chat template writes a special token that the tokenizer does not have"


class Gathered:
    """Texts and slots of some conversations.

    Conversations with the same row of roles, in a template that allows it (`Template.plan`), are gathered together;
    the others one by one. A text is named by its number: texts that stand for special tokens are negative.
    """

    def __init__(self, template: Template, special_id: Callable[[str], int | None]) -> None:
        self.refused: dict[int, str] = {}
        self._template = template
        self._special_id = special_id
        self._texts: list[str] = []
        self._literals: dict[str, int] = {}
        self._specials: dict[str, int] = {}
        self._shapes: list[Shape] = []

    def add(self, conversations: Sequence[Sequence[Message]]) -> None:
        """Gather conversations; called once."""
        alike: dict[tuple[str, ...], list[int]] = {}
        contents: list[list[str]] = []
        for number, messages in enumerate(conversations):
            said: list[str] = [message.get("content") or "" for message in messages]
            contents.append(said)
            if all(said) and all(map(_is_plain, messages)):
                alike.setdefault(tuple([message["role"] for message in messages]), []).append(number)
            else:
                self._add_one(number, messages)
        for roles, numbers in alike.items():
            plan = self._plan(roles)
            fit = [] if plan is None else numbers
            if plan and _trims(plan, len(roles)):
                fit = [number for number in numbers if all(map(str.strip, contents[number]))]
                for number in fit:
                    contents[number] += map(str.strip, contents[number][:])
            if plan and fit:
                weights = _weights([conversations[number] for number in fit])
                self._add_alike(plan, fit, [contents[number] for number in fit], weights)
            for number in sorted({*numbers} - {*fit}) if len(fit) < len(numbers) else ():
                self._add_one(number, conversations[number])

    def shapes(self) -> list[Shape]:
        """The slots, by shape. Texts are numbered as `tokenized` returns them."""
        specials = len(self._specials)
        return [Shape(shape.rows, shape.texts + specials, shape.mask) for shape in self._shapes]

    def tokenized(self, tokenize: Callable[[Sequence[str]], Ids]) -> Ids:
        """Ids of all texts: first those of the special tokens, the last one found first, then the others."""
        ids = tokenize(self._texts)
        specials = np.array([self._special_id(name) for name in reversed(self._specials)], np.uint32)
        offsets = np.concatenate([np.arange(len(specials)), ids.offsets + len(specials)])
        return Ids(np.concatenate([specials, ids.tokens]), offsets)

    def _plan(self, roles: tuple[str, ...]) -> Sequence[Stretch] | None:
        if roles != (TEXT,):
            return self._template.plan(roles)
        eos = self._template.eos
        return [Stretch((0,), 0), *([Stretch((eos,), 0, True)] if eos else [])]

    def _add_alike(
        self, plan: Sequence[Stretch], numbers: list[int], contents: list[list[str]], weights: NDArray[np.float64]
    ) -> None:
        texts = np.empty((len(numbers), len(plan)), np.int64)
        for slot, stretch in enumerate(plan):
            if stretch.special:
                if self._special_id(str(stretch.parts[0])) is None:
                    self.refused.update(dict.fromkeys(numbers, UNKNOWN_SPECIAL))
                    return
                texts[:, slot] = self._special(str(stretch.parts[0]))
            elif any(isinstance(part, int) for part in stretch.parts):
                texts[:, slot] = np.arange(len(self._texts), len(self._texts) + len(numbers))
                self._texts += _written(stretch.parts, contents)
            else:
                texts[:, slot] = self._literal("".join(map(str, stretch.parts)))
        self._shapes.append(Shape(np.array(numbers), texts, _mask(plan, weights)))

    def _add_one(self, number: int, messages: Sequence[Message]) -> None:
        try:
            segments = self._segments(messages)
        except BadInput as error:
            self.refused[number] = str(error)
            return
        if any(segment.special and self._special_id(segment.text) is None for segment in segments):
            self.refused[number] = UNKNOWN_SPECIAL
            return
        texts = [self._special(one.text) if one.special else self._literal(one.text) for one in segments]
        mask = _mask(segments, _weights([messages]))
        self._shapes.append(Shape(np.array([number]), np.array([texts], np.int64), mask))

    def _segments(self, messages: Sequence[Message]) -> list[Segment]:
        if messages[0]["role"] != TEXT:
            return self._template.segments(messages)
        eos = self._template.eos
        return [Segment(messages[0]["content"], 0), *([Segment(eos, 0, True)] if eos else [])]

    def _special(self, text: str) -> int:
        return -1 - self._specials.setdefault(text, len(self._specials))

    def _literal(self, text: str) -> int:
        """The number of a text that may come up often: it is tokenized once."""
        if text not in self._literals:
            self._literals[text] = len(self._texts)
            self._texts.append(text)
        return self._literals[text]


def _is_plain(message: Message) -> bool:
    """Whether a message has nothing but a role and a content to show, and no weight that makes it only read."""
    return type(message["content"]) is str and (len(message) == 2 or (len(message) == 3 and bool(message.get(WEIGHT))))


def _weights(conversations: Sequence[Sequence[Message]]) -> NDArray[np.float64]:
    """Of each message of conversations of one length."""
    return np.array([[message.get(WEIGHT, 1.0) for message in messages] for messages in conversations], np.float64)


def _mask(said: Sequence[Segment | Stretch], weights: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Of each slot what its tokens count in each conversation: as much as the answer that they are of."""
    answers = np.array([-1 if one.answer is None else one.answer for one in said], np.int64)
    return np.where(answers < 0, np.uint8(0), mask_of(weights)[:, answers])


def _trims(plan: Sequence[Stretch], messages: int) -> bool:
    return any(isinstance(part, int) and part >= messages for stretch in plan for part in stretch.parts)


def _written(parts: Sequence[str | int], contents: list[list[str]]) -> list[str]:
    """A stretch's text in each conversation."""
    places = [at for at, part in enumerate(parts) if isinstance(part, int)]
    if len(places) == 1:
        number = parts[places[0]]
        before, after = "".join(map(str, parts[: places[0]])), "".join(map(str, parts[places[0] + 1 :]))
        return [before + said[int(number)] + after for said in contents]
    return ["".join([said[part] if isinstance(part, int) else part for part in parts]) for said in contents]
