"""Conversations to token ids with a mask: 1 where the model should learn to write the token.

Each segment of the chat template is tokenized by itself, so the mask follows segments and never a prefix's length.
Special tokens come from the template alone: the same characters inside a message are plain text. No BOS is added to
what a template renders (it writes its own where the model wants one).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from corpus.record import TEXT, Message
from refit.chat import Segment, Template, load_template
from refit.errors import BadInput

# What the model reads when it is served is tokenized in one piece; so many conversations are compared with that.
COMPARED = 64


@dataclass(frozen=True)
class Row:
    """A document: ids and mask of one length."""

    ids: NDArray[np.int64]
    mask: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.ids)


class Encoder:
    """A base model's tokenizer and chat template."""

    def __init__(self, folder: Path) -> None:
        self._whole = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._plain.encode_special_tokens = True  # as plain text, that is
        for tokenizer in (self._whole, self._plain):
            tokenizer.no_truncation()
            tokenizer.no_padding()
        self.template: Template = load_template(folder)
        self.size = int(self._whole.get_vocab_size(with_added_tokens=True))
        named = dict(self.template.tokens)
        eos = self._whole.token_to_id(named.get("eos_token", ""))
        pad = self._whole.token_to_id(named.get("pad_token", ""))
        self.eos: int | None = eos
        self.pad: int = next((token for token in (pad, eos) if token is not None), 0)

    def rows(self, conversations: Sequence[Sequence[Message]]) -> list[Row | str]:
        """A row for each conversation; the reason where one cannot be learnt from."""
        cut: list[list[Segment] | str] = []
        for messages in conversations:
            try:
                cut.append(self._segments(messages))
            except BadInput as error:
                cut.append(str(error))
        ids = self._tokenized(
            segment.text for part in cut if isinstance(part, list) for segment in part if not segment.special
        )
        return [part if isinstance(part, str) else self._row(part, ids) for part in cut]

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

    def _segments(self, messages: Sequence[Message]) -> list[Segment]:
        if messages[0]["role"] == TEXT:
            eos = dict(self.template.tokens).get("eos_token")
            return [Segment(messages[0]["content"], True), *([Segment(eos, True, True)] if eos else [])]
        return self.template.segments(messages)

    def _tokenized(self, texts: Iterable[str]) -> dict[str, list[int]]:
        unique = list(dict.fromkeys(texts))
        encoded = self._plain.encode_batch_fast(unique, add_special_tokens=False)
        return {text: encoding.ids for text, encoding in zip(unique, encoded, strict=True)}

    def _row(self, segments: Sequence[Segment], ids: dict[str, list[int]]) -> Row | str:
        tokens: list[int | None] = []
        mask: list[int] = []
        for segment in segments:
            more = [self._whole.token_to_id(segment.text)] if segment.special else ids[segment.text]
            tokens += more
            mask += [int(segment.learn)] * len(more)
        mask[:1] = [0] * len(mask[:1])  # nothing comes before the first token to predict it from
        if None in tokens:
            return "the chat template writes a special token that the tokenizer does not have"
        if not any(mask):
            return "nothing to learn: no token of an answer is left"
        return Row(np.array(tokens, np.int64), np.array(mask, np.uint8))
