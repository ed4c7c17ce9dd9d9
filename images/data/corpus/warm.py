"""`python -m corpus.warm`: compile every kernel and keep it on disk, so that no first run waits for the compiler."""

from __future__ import annotations

import numpy as np

from corpus import lsh, overlap
from corpus.binpack import best_fit_decreasing
from corpus.shingles import Texts
from refit.spec import Dedup

SETTINGS = Dedup(threshold=0.5, ngram=2)


def main() -> None:
    """Run each on a few texts, with the types that the phases use."""
    clusters()
    texts, some = _texts(), np.arange(4, dtype=np.int64)
    lsh.matches([texts], np.arange(len(texts), dtype=np.int64) % 3, SETTINGS)
    lsh.similarity([texts], some, some + 1, SETTINGS.ngram)
    overlap.held(texts, overlap.Guarded.of(texts, SETTINGS.ngram, 2))
    best_fit_decreasing(some + 1, 8)


def clusters() -> None:
    """Those that `lsh.clusters` runs."""
    lsh.clusters([_texts()], SETTINGS)


def _texts() -> Texts:
    sentences = [f"the quick brown fox number {number % 7} jumps over it" for number in range(600)]
    return Texts.of([*sentences, "été 退款", ""])


if __name__ == "__main__":
    main()
