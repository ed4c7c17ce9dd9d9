"""Near duplicates: our signatures beside the library that taught us, in one run, as a ratio."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import datasketch
import numpy as np
import pytest

from corpus import binpack, minhash
from corpus.shingles import Texts

pytestmark = pytest.mark.benchmark

WORDS = np.array([f"word{number}" for number in range(4000)])
RESULT = Path("bench-data.json")


def documents(count: int) -> list[str]:
    """English-like documents of about 1 KB."""
    rng = np.random.default_rng(1)
    picked = WORDS[np.minimum(rng.zipf(1.3, size=(count, 130)), len(WORDS)) - 1]
    return [" ".join(row) for row in picked]


def rate(work: Callable[[], int], runs: int = 5) -> float:
    """Items a second: the median of some runs, after one to warm up."""
    work()
    found = []
    for _ in range(runs):
        started = time.perf_counter()
        done = work()
        found.append(done / (time.perf_counter() - started))
    return statistics.median(found)


def note(name: str, ours: float, peer: float | None = None) -> None:
    """Print a line of the table and keep it in bench-data.json."""
    table = json.loads(RESULT.read_text()) if RESULT.is_file() else {}
    table[name] = {"ours": ours, "peer": peer, "ratio": ours / peer if peer else None}
    RESULT.write_text(json.dumps(table, indent=1))
    beside = f"   peer {peer:12,.0f}/s   ratio {ours / peer:6.1f}" if peer else ""
    print(f"\n{name:<44}{ours:12,.0f}/s{beside}")


def test_signatures_of_112_permutations() -> None:
    some = documents(20_000)
    texts = Texts.of(some)
    keys, sizes = np.zeros((14, len(some)), np.uint64), np.zeros(len(some), np.int64)

    def ours() -> int:
        minhash.band_keys(texts, 5, 8, 1, keys, sizes)
        return len(some)

    def theirs() -> int:
        for text in some[:500]:
            split = text.split()
            sketch = datasketch.MinHash(num_perm=112)
            sketch.update_batch([" ".join(split[i : i + 5]).encode() for i in range(len(split) - 4)])
        return 500

    mine, peer = rate(ours), rate(theirs, 3)
    note("signatures with band keys, 1 KB documents (datasketch)", mine, peer)
    assert mine > peer


def test_packing_a_million_lengths() -> None:
    lengths = np.minimum(np.random.default_rng(1).lognormal(5.5, 1.0, 1_000_000).astype(np.int64) + 1, 4096)
    packed = binpack.best_fit_decreasing(lengths, 4096)
    loads = np.bincount(packed.pack, weights=lengths)
    assert loads.max() <= 4096
    assert loads.sum() == lengths.sum()
    note("packing, lengths at 4096", rate(lambda: len(binpack.best_fit_decreasing(lengths, 4096).pack)))
