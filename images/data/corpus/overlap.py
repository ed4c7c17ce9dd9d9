"""Whether a text holds another one: by the n-grams of words that the two share.

Words as in `shingles` (Han and kana by the character, case and punctuation passed over), so a text that was wrapped,
cased or punctuated anew is still found. An evaluation text of fewer than n words is looked for as a whole.

Source: Brown et al. 2020, Language Models are Few-Shot Learners, appendix C (13-grams); n is a setting here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from corpus.jit import in_parts, kernel
from corpus.shingles import Bytes, Hashes, Offsets, Texts, room, shingle, words

Index = NDArray[np.int64]
Shares = NDArray[np.float64]


@dataclass(frozen=True)
class Guarded:
    """The n-grams of evaluation texts, sorted: gram[i] belongs to text owner[i]; a text has `size` different ones."""

    grams: Hashes
    owners: Index
    spans: NDArray[np.int64]
    size: Index
    short: Index

    @classmethod
    def of(cls, texts: Texts, n: int, min_words: int) -> Guarded:
        """The grams of texts that have at least `min_words` words; the numbers of the others are in `short`."""
        grams, owners, spans = [], [], []
        size = np.zeros(len(texts), np.int64)
        for text in range(len(texts)):
            start, stop = int(texts.offsets[text]), int(texts.offsets[text + 1])
            out = np.empty(room(start, stop), np.uint64)
            count = words(texts.data, start, stop, out)
            if count < min_words:
                continue
            own = np.unique(out[: shingle(texts.data, start, stop, n, out)])
            size[text] = len(own)
            grams.append(own)
            owners.append(np.full(len(own), text))
            spans.append(min(n, count))
        if not grams:
            return cls(
                np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, np.int64), size, np.arange(len(texts))
            )
        flat = np.concatenate(grams)
        order = np.argsort(flat, kind="stable")
        return cls(
            flat[order], np.concatenate(owners)[order].astype(np.int64), np.unique(spans).astype(np.int64), size,
            np.flatnonzero(size == 0),
        )  # fmt: skip


def held(texts: Texts, guarded: Guarded) -> tuple[Index, Shares]:
    """For each text the evaluation text that it holds most of (-1: none), and which share of that one's n-grams."""
    found = np.full(len(texts), -1, np.int64)
    share = np.zeros(len(texts), np.float64)
    if len(guarded.grams):
        in_parts(
            lambda first, last: _held(
                texts.data, texts.offsets, first, last, guarded.grams, guarded.owners, guarded.spans, guarded.size,
                found, share,
            ),
            len(texts),
        )  # fmt: skip
    return found, share


@kernel
def _held(
    data: Bytes, offsets: Offsets, first: int, last: int, grams: Hashes, owners: Index, spans: Index, size: Index,
    found: Index, share: Shares,
) -> None:  # fmt: skip
    longest = 0
    for text in range(first, last):
        longest = max(longest, room(offsets[text], offsets[text + 1]))
    out: Hashes = np.empty(longest, np.uint64)
    counts = np.zeros(len(size), np.int64)
    touched = np.empty(len(size), np.int64)
    for text in range(first, last):
        number = 0
        for span in spans:
            count = shingle(data, offsets[text], offsets[text + 1], span, out)
            own = np.sort(out[:count])
            for at in range(count):
                if at and own[at] == own[at - 1]:
                    continue
                place = np.searchsorted(grams, own[at])
                while place < len(grams) and grams[place] == own[at]:
                    owner = owners[place]
                    if counts[owner] == 0:
                        touched[number] = owner
                        number += 1
                    counts[owner] += 1
                    place += 1
        for at in range(number):
            owner = touched[at]
            part = min(1.0, counts[owner] / size[owner])
            if part > share[text] or (part == share[text] and owner < found[text]):
                share[text], found[text] = part, owner
            counts[owner] = 0
