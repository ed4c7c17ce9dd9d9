"""Conversations as rows of slots, a slot being a segment: which text is said there and how much it is learnt.

Slots are filled for all conversations of one shape at once, and the tokens of all of them are laid out in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from corpus.bpe import Ids
from corpus.jit import in_parts, kernel

Index = NDArray[np.int64]


@dataclass(frozen=True)
class Shape:
    """Some conversations with equally many slots; `texts` and `mask` have shape (conversations, slots)."""

    rows: Index
    texts: Index
    mask: NDArray[np.uint8]


@dataclass(frozen=True)
class Laid:
    """Tokens and mask of all conversations behind each other; how many tokens each has, and how many are learnt."""

    tokens: NDArray[np.uint32]
    mask: NDArray[np.uint8]
    lengths: Index
    learnt: Index


def lay_out(count: int, shapes: Sequence[Shape], ids: Ids) -> Laid:
    """Lay out `count` conversations; one that no shape names has no tokens.

    A conversation's first token is never learnt: nothing comes before it to predict it from.
    """
    slots = np.zeros(count, np.int64)
    for shape in shapes:
        slots[shape.rows] = shape.texts.shape[1]
    first_slot = np.cumsum(slots) - slots
    texts, said = np.empty(int(slots.sum()), np.int64), np.empty(int(slots.sum()), np.uint8)
    for shape in shapes:
        at = first_slot[shape.rows][:, None] + np.arange(shape.texts.shape[1])
        texts[at], said[at] = shape.texts, shape.mask
    sizes = np.diff(ids.offsets)[texts]
    lengths, learnt = _sums(sizes, first_slot, slots), _sums(np.where(said > 0, sizes, 0), first_slot, slots)
    ends = np.cumsum(sizes)
    tokens = np.empty(int(lengths.sum()), np.uint32)
    starts = ids.offsets[texts]
    in_parts(lambda first, last: _copy(ids.tokens, starts, sizes, ends, first, last, tokens), len(texts))
    mask = np.repeat(said, sizes)
    some = lengths > 0
    first = (np.cumsum(lengths) - lengths)[some]
    learnt[some] -= mask[first] > 0
    mask[first] = 0
    return Laid(tokens, mask, lengths, learnt)


def _sums(values: Index, first: Index, counts: Index) -> Index:
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(values)])
    sums: Index = before[first + counts] - before[first]
    return sums


@kernel
def _copy(
    source: NDArray[np.uint32], starts: Index, sizes: Index, ends: Index, first: int, last: int, out: NDArray[np.uint32]
) -> None:
    for slot in range(first, last):
        start, place = starts[slot], ends[slot] - sizes[slot]
        for at in range(sizes[slot]):
            out[place + at] = source[start + at]


def without(laid: Laid, which: Sequence[int]) -> Laid:
    """The same without the tokens of some conversations; their length becomes 0."""
    keep = np.ones(len(laid.lengths), np.bool_)
    keep[list(which)] = False
    if keep[laid.lengths > 0].all():
        return laid
    kept = np.repeat(keep, laid.lengths)
    return Laid(laid.tokens[kept], laid.mask[kept], np.where(keep, laid.lengths, 0), laid.learnt)
