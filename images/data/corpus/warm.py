"""`python -m corpus.warm`: compile every kernel and keep it on disk, so that no first run waits for the compiler."""

from __future__ import annotations

import numpy as np

from corpus import lsh, overlap
from corpus.binpack import best_fit_decreasing
from corpus.shingles import Texts
from refit.spec import Dedup


def main() -> None:
    """Run each on a few texts, with the types that the phases use."""
    sentences = [f"the quick brown fox number {number % 7} jumps over it" for number in range(600)]
    texts = Texts.of([*sentences, "été 退款", ""])
    settings = Dedup(threshold=0.5, ngram=2)
    some = np.arange(4, dtype=np.int64)
    lsh.clusters([texts], settings)
    lsh.matches([texts], np.arange(len(texts), dtype=np.int64) % 3, settings)
    lsh.similarity([texts], some, some + 1, settings.ngram)
    overlap.held(texts, overlap.Guarded.of(texts, settings.ngram, 2))
    best_fit_decreasing(some + 1, 8)


if __name__ == "__main__":
    main()
