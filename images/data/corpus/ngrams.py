"""How surprised a model of word trigrams is by a text: its perplexity, low for texts like those it was fitted on.

Words as in `shingles`: Han and kana are a word each, so a trigram of Chinese is three characters. Probabilities are
interpolated from trigrams to single words (Witten and Bell 1991; Chen and Goodman 1998, section 2.6); a word that was
never seen has its share too. That perplexity tells clean text from other text: Wenzek et al. 2019 (CCNet), section 3.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from corpus.jit import in_parts, kernel
from corpus.shingles import FACTOR, Bytes, Hashes, Offsets, Texts, mix64, room, words

ORDER = 3
VOCABULARY = 1 << 20
"""How many words there could be: what was never seen is shared out among so many."""

Counts = NDArray[np.uint32]
Slots = NDArray[np.int32]
Index = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Ngrams:
    """What was counted; row i is the n-gram of hash keys[i] (ascending; n is part of the hash).

    Attributes:
        counts: how often it occurred.
        totals: how often a word came after it.
        distinct: how many different words came after it.
        start: (words in all, different words): totals and distinct of the empty context.
    """

    keys: Hashes
    counts: Counts
    totals: Counts
    distinct: Counts
    start: Index

    def perplexity(self, texts: Texts) -> tuple[Floats, Index]:
        """Per text its perplexity a word (NaN where it has no word), and how many words it has."""
        found, counted = np.full(len(texts), np.nan), np.zeros(len(texts), np.int64)
        in_parts(
            lambda first, last: _perplexity(
                texts.data, texts.offsets, first, last, self.keys, self.counts, self.totals, self.distinct, self.start,
                self._slots, found, counted,
            ),
            len(texts),
        )  # fmt: skip
        return found, counted

    @cached_property
    def _slots(self) -> Slots:
        return slots_of(self.keys)


@kernel
def gram(of: Hashes, last: int, n: int) -> np.uint64:
    """The hash of the n words that end with word `last`."""
    key = FACTOR * np.uint64(n)
    for at in range(last - n + 1, last + 1):
        key = mix64(key ^ of[at])
    return key


@kernel
def grams(data: Bytes, offsets: Offsets, n: int, keys: Hashes, contexts: Hashes) -> int:
    """All n-grams of texts, and of each the n - 1 words before its last; returns how many."""
    found = 0
    for text in range(len(offsets) - 1):
        out: Hashes = np.empty(room(offsets[text], offsets[text + 1]), np.uint64)
        for at in range(n - 1, words(data, offsets[text], offsets[text + 1], out)):
            keys[found] = gram(out, at, n)
            contexts[found] = gram(out, at - 1, n - 1)
            found += 1
    return found


@kernel
def slots_of(keys: Hashes) -> Slots:
    """Rows by hash: a row lies at its hash or in the next free place after it; at most half of the places are taken."""
    size = 1
    while size < 2 * len(keys):
        size *= 2
    slots = np.full(size, -1, np.int32)
    for row in range(len(keys)):
        at = keys[row] & np.uint64(size - 1)
        while slots[at] >= 0:
            at = (at + np.uint64(1)) & np.uint64(size - 1)
        slots[at] = row
    return slots


@kernel
def _row(key: np.uint64, keys: Hashes, slots: Slots) -> int:
    """The row of a hash; -1 where it has none."""
    last = np.uint64(len(slots) - 1)
    at = key & last
    while slots[at] >= 0 and keys[slots[at]] != key:
        at = (at + np.uint64(1)) & last
    return int(slots[at])


@kernel
def _perplexity(
    data: Bytes, offsets: Offsets, first: int, last: int, keys: Hashes, counts: Counts, totals: Counts,
    distinct: Counts, start: Index, slots: Slots, found: Floats, counted: Index,
) -> None:  # fmt: skip
    before = np.empty(ORDER, np.int64)  # rows of the n-grams that end with the word before, by n
    for text in range(first, last):
        out: Hashes = np.empty(room(offsets[text], offsets[text + 1]), np.uint64)
        number = words(data, offsets[text], offsets[text + 1], out)
        log_likelihood = 0.0
        before[:] = -1
        for at in range(number):
            row = _row(gram(out, at, 1), keys, slots)
            seen = counts[row] if row >= 0 else 0
            likely = (seen + start[1] / VOCABULARY) / (start[0] + start[1])
            for n in range(2, ORDER + 1):
                context = before[n - 1]
                before[n - 1] = row
                row = -1
                if context >= 0 and totals[context] > 0:
                    row = _row(gram(out, at, n), keys, slots)
                    seen = counts[row] if row >= 0 else 0
                    likely = (seen + distinct[context] * likely) / (totals[context] + distinct[context])
            log_likelihood += np.log(likely)
        counted[text] = number
        if number:
            found[text] = np.exp(-log_likelihood / number)
