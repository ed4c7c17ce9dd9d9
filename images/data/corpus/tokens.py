"""Conversations to token ids with a mask: what each token weighs in the loss in 255ths, 0 where it is only read.

Each segment of the chat template is tokenized by itself, so the mask follows segments and never a prefix's length. All
tokens of an answer, and the one that ends it, have the weight that the answer's message has.
Special tokens come from the template alone: the same characters inside a message are plain text. No BOS is added to
what a template renders (it writes its own where the model wants one).

Many conversations are encoded at once: their segments are gathered, tokenized in one call, and laid out as arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from corpus.gate import Gated
from corpus.gather import Gathered
from corpus.record import TEXT, Message
from corpus.slots import lay_out, without
from refit.chat import Template, load_template
from refit.spec import TokenLimits

# What the model reads when it is served is tokenized in one piece; so many conversations are compared with that.
COMPARED = 64
ANY_LENGTH = TokenLimits()
NOTHING = "nothing to learn: no token of an answer is left"


@dataclass(frozen=True)
class Row:
    """A document: ids and mask of one length."""

    ids: NDArray[np.int64]
    mask: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Encoded:
    """Conversations behind each other.

    `tokens` and `mask` have one length, the sum of `lengths`, which has one number a conversation: 0 for one that is
    refused. `refused` says which those are and why, in their order.
    """

    tokens: NDArray[np.uint32]
    mask: NDArray[np.uint8]
    lengths: NDArray[np.int64]
    refused: list[tuple[int, str]]


def _outside(lengths: NDArray[np.int64], limits: TokenLimits) -> dict[int, str]:
    """Why conversations are too short or too long, by their number."""
    most = np.iinfo(np.int64).max if limits.max is None else limits.max
    allowed = f"data.tokens allows {limits.min} to {'any number' if limits.max is None else limits.max}"
    wrong = np.flatnonzero((lengths > 0) & ((lengths < limits.min) | (lengths > most)))
    return {at: f"length in tokens: {lengths[at]}, {allowed}" for at in wrong.tolist()}


class Encoder:
    """A base model's tokenizer and chat template."""

    def __init__(self, folder: Path) -> None:
        self._whole = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._whole.no_truncation()
        self._whole.no_padding()
        self._plain = Gated(folder / "tokenizer.json")
        self.template: Template = load_template(folder)
        self.size = int(self._whole.get_vocab_size(with_added_tokens=True))
        named = dict(self.template.tokens)
        eos = self._whole.token_to_id(named.get("eos_token", ""))
        pad = self._whole.token_to_id(named.get("pad_token", ""))
        self.eos: int | None = eos
        self.pad: int = next((token for token in (pad, eos) if token is not None), 0)

    @property
    def tokenized_by(self) -> str:
        """Library and version that tokenized the last large batch."""
        return self._plain.name

    def encode(
        self, conversations: Sequence[Sequence[Message]], limits: TokenLimits = ANY_LENGTH,
        refuse: Mapping[int, str] | None = None,
    ) -> Encoded:  # fmt: skip
        """Tokens and mask of conversations; each call is one batch, of as many as memory allows.

        Refused are those in which nothing is learnt, those outside the limits, and those that `refuse` says.
        """
        gathered = Gathered(self.template, self._whole.token_to_id)
        gathered.add(conversations)
        laid = lay_out(len(conversations), gathered.shapes(), gathered.tokenized(self._plain))
        reasons = dict.fromkeys(np.flatnonzero(laid.learnt == 0).tolist(), NOTHING)
        reasons |= _outside(laid.lengths, limits) | gathered.refused | dict(refuse or {})
        laid = without(laid, list(reasons))
        return Encoded(laid.tokens, laid.mask, laid.lengths, sorted(reasons.items()))

    def rows(self, conversations: Sequence[Sequence[Message]]) -> list[Row | str]:
        """A row for each conversation; the reason where one cannot be learnt from."""
        encoded = self.encode(conversations)
        ends = np.cumsum(encoded.lengths)
        reasons = dict(encoded.refused)
        return [
            reasons[at] if at in reasons else Row(encoded.tokens[first:last].astype(np.int64), encoded.mask[first:last])
            for at, (first, last) in enumerate(zip((ends - encoded.lengths).tolist(), ends.tolist(), strict=True))
        ]

    def differing(self, conversations: Sequence[Sequence[Message]]) -> int:
        """How many conversations tokenize differently in segments than in one piece, as a server does it.

        Only those without special-token text in a message can be compared: that is plain text here.
        """
        count = 0
        for messages in conversations:
            if any(special in message["content"] for message in messages for special in self.template.specials):
                continue
            row = self.rows([messages])[0]
            if isinstance(row, Row) and messages[0]["role"] != TEXT:
                opened = self.template.render(messages[:-1], generation=True)
                served = self._whole.encode(opened, add_special_tokens=False).ids
                count += row.ids[: len(served)].tolist() != served
        return count
