"""Two tokenizers of one tokenizer.json: Hugging Face's, which is right by definition, and a fast one.

Both take a text as plain text: what a special token is called means nothing inside it. The fast one (gigatoken) reads
only part of what a tokenizer.json may say; what it does not read is brought into a form that it does, or refused:

- Special tokens are taken out of what it is told, so that their text stays plain.
- Digits split off before the byte-level regex (SmolLM2's kind) are split off here.
- It wants a token for every byte. Those that the vocabulary lacks get ids beyond its end, and a text in which such an
  id comes up is given to Hugging Face's, which leaves the byte out in its own way.
"""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, pre_tokenizers

_ASCII_DIGIT = re.compile("([0-9])")


class Ids(NamedTuple):
    """Token ids of some texts behind each other: text n has `tokens[offsets[n]:offsets[n + 1]]`."""

    tokens: NDArray[np.uint32]
    offsets: NDArray[np.int64]


class Unsupported(ValueError):
    """The fast tokenizer does not do what this tokenizer.json asks for; the message says what."""


class Reference:
    """Hugging Face's tokenizer, without truncation, padding and added special tokens."""

    name = f"tokenizers {version('tokenizers')}"

    def __init__(self, source: str) -> None:
        self._tokenizer = Tokenizer.from_str(source)
        self._tokenizer.encode_special_tokens = True  # as plain text, that is
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.end = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.added = [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]

    def __call__(self, texts: Sequence[str]) -> Ids:
        """Tokenize texts."""
        found = [one.ids for one in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        offsets = _offsets(np.fromiter(map(len, found), np.int64, len(found)))
        return Ids(np.fromiter(chain.from_iterable(found), np.uint32, int(offsets[-1])), offsets)


class Fast:
    """gigatoken, for byte-level BPE.

    Raises:
        Unsupported: the tokenizer is of another kind.
    """

    name = f"gigatoken {version('gigatoken')}"

    def __init__(self, source: str, reference: Reference) -> None:
        import gigatoken  # it brings awkward, a second to import: only where it pays

        told, self._single_digits = _told(json.loads(source), reference.end)
        self._reference = reference
        try:
            self._tokenizer = gigatoken.Tokenizer.from_json(json.dumps(told))
        except (RuntimeError, ValueError) as error:
            raise Unsupported(str(error).partition("\n")[0]) from error

    def __call__(self, texts: Sequence[str]) -> Ids:
        """Tokenize texts, on all cores."""
        pieces, starts = _split_digits(texts) if self._single_digits else (list(texts), None)
        if not pieces:
            return Ids(np.zeros(0, np.uint32), np.zeros(1, np.int64))
        layout = self._tokenizer.encode_batch(pieces).layout
        offsets = np.asarray(layout.offsets.data, np.int64)
        tokens = np.asarray(layout.content.data, np.uint32)[: offsets[-1]]
        return self._without_unknown_bytes(texts, Ids(tokens, offsets if starts is None else offsets[starts]))

    def _without_unknown_bytes(self, texts: Sequence[str], ids: Ids) -> Ids:
        places = np.flatnonzero(ids.tokens >= self._reference.end)
        if not len(places):
            return ids
        wrong = np.unique(np.searchsorted(ids.offsets, places, side="right") - 1).tolist()
        right = self._reference([texts[number] for number in wrong])
        parts, done = [], 0
        lengths = np.diff(ids.offsets)
        for at, number in enumerate(wrong):
            parts += [ids.tokens[done : ids.offsets[number]], right.tokens[right.offsets[at] : right.offsets[at + 1]]]
            done, lengths[number] = ids.offsets[number + 1], len(parts[-1])
        return Ids(np.concatenate([*parts, ids.tokens[done:]]), _offsets(lengths))


def _told(config: dict[str, Any], end: int) -> tuple[dict[str, Any], bool]:
    """The tokenizer.json that the fast tokenizer is given, and whether single digits are split off before.

    `end` is the first id behind those of the vocabulary, which may have holes.
    """
    model, pre = config["model"], config.get("pre_tokenizer") or {}
    steps = pre.get("pretokenizers", []) if pre.get("type") == "Sequence" else [pre]
    if model.get("type") != "BPE" or model.get("byte_fallback") or model.get("dropout"):
        raise Unsupported(f"the model is {model.get('type')}, not byte-level BPE")
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space"):
        raise Unsupported("the text is not cut for byte-level BPE")
    added = [token for token in config.get("added_tokens") or [] if not token.get("special")]
    digits = len(steps) == 2 and steps[0].get("type") == "Digits"
    if digits:
        if not steps[0].get("individual_digits") or config.get("normalizer") or added:
            raise Unsupported("digits are split off in another way")
        pre = steps[1]
    vocabulary = dict(model["vocab"])
    for byte, letter in _bytes().items():
        vocabulary.setdefault(letter, end + byte)
    told = {**config, "model": {**model, "vocab": vocabulary}, "added_tokens": added, "pre_tokenizer": pre}
    return told, digits


@cache
def _bytes() -> dict[int, str]:
    """The letter that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {byte: chr(byte) for byte in shown} | {byte: chr(256 + at) for at, byte in enumerate(hidden)}
    if set(letters.values()) != set(pre_tokenizers.ByteLevel.alphabet()):
        raise AssertionError("the byte-level alphabet is not the one we know")
    return letters


def _split_digits(texts: Sequence[str]) -> tuple[list[str], NDArray[np.int64]]:
    """The texts with every numeral in a piece of its own, and where each text's pieces begin (and the last end)."""
    pieces: list[str] = []
    counts = np.empty(len(texts), np.int64)
    for number, text in enumerate(texts):
        before = len(pieces)
        pieces += _ASCII_DIGIT.split(text) if text.isascii() else _around_numerals(text)
        counts[number] = len(pieces) - before
    return pieces, _offsets(counts)


def _around_numerals(text: str) -> list[str]:
    numerals = np.flatnonzero(_numeral()[np.frombuffer(text.encode("utf-32-le"), np.uint32)]).tolist()
    edges = [0, *chain.from_iterable((at, at + 1) for at in numerals), len(text)]
    return [text[first:last] for first, last in pairwise(edges)]


@cache
def _numeral() -> NDArray[np.bool_]:
    """For every code point whether it is a numeral (Unicode's N), as Hugging Face's `Digits` sees it."""
    return np.array([unicodedata.category(chr(point))[0] == "N" for point in range(sys.maxunicode + 1)])


def _offsets(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
