"""How much a text is like good ones and unlike bad ones: a linear classifier over hashed words and pairs of words.

Words as in `shingles`, so Chinese is judged by characters and pairs of them. Of fastText's kind (Joulin et al. 2016),
which Li et al. 2024 (DataComp-LM, section 4.4) found the best filter of web text, without its hidden layer: on so few
classes it adds nothing, and a text's score is a sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from corpus.jit import in_parts, kernel
from corpus.ngrams import gram
from corpus.shingles import Bytes, Hashes, Offsets, Texts, room, words

BUCKETS = 1 << 18
"""Features; n-grams that share one share a weight (Weinberger et al. 2009)."""
ORDER = 2

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Linear:
    """A weight for each bucket, and the bias."""

    weights: NDArray[np.float32]
    bias: float

    def quality(self, texts: Texts) -> Floats:
        """Per text how likely it is a good one, 0 to 1, were there as many good as bad; NaN where it has no word."""
        sums = np.full(len(texts), np.nan)
        in_parts(lambda first, last: _sums(texts.data, texts.offsets, first, last, self.weights, sums), len(texts))
        return 1 / (1 + np.exp(-(sums + self.bias)))


@kernel
def buckets(data: Bytes, start: int, stop: int, out: NDArray[np.int64]) -> int:
    """The buckets of the n-grams of data[start:stop], in `out` (of twice its `room`); returns how many."""
    of: Hashes = np.empty(room(start, stop), np.uint64)
    number = words(data, start, stop, of)
    found = 0
    for n in range(1, ORDER + 1):
        for at in range(n - 1, number):
            out[found] = gram(of, at, n) & np.uint64(BUCKETS - 1)
            found += 1
    return found


@kernel
def _sums(
    data: Bytes, offsets: Offsets, first: int, last: int, weights: NDArray[np.float32], sums: Floats
) -> None:  # fmt: skip
    for text in range(first, last):
        out = np.empty(ORDER * room(offsets[text], offsets[text + 1]), np.int64)
        number = buckets(data, offsets[text], offsets[text + 1], out)
        if number:
            total = 0.0
            for at in range(number):
                total += weights[out[at]]
            # By the root of their number: about a length of 1, as most n-grams of a text occur once.
            sums[text] = total / np.sqrt(number)
