"""Kernels of the data stage beside the libraries that taught us, in one run, as a ratio."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from corpus import binpack, minhash
from corpus.shingles import Texts
from tests.benchmarks.documents import Planted, english
from tests.benchmarks.table import note, peer, rate

pytestmark = pytest.mark.benchmark

PEERS = {"datasketch": 1_000, "rensa": 10_000, "daft": 20_000}


def test_signatures_of_112_permutations(tmp_path: Path) -> None:
    """Ours end in the keys of 14 bands; the peers' in signatures."""
    file = Planted.write(tmp_path / "documents.jsonl", 20_000, english()).path
    texts = Texts.of([json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines()])
    keys, sizes = np.zeros((14, len(texts)), np.uint64), np.zeros(len(texts), np.int64)

    def ours() -> int:
        minhash.band_keys(texts, 5, 8, 1, keys, sizes)
        return len(texts)

    mine = rate(ours)
    best = 0.0
    for name, count in PEERS.items():
        theirs = peer("signatures", name, file, count)
        note(f"signatures, 1 KB documents ({name})", mine, theirs)
        best = max(best, theirs or 0)
    assert mine > best


def test_packing_a_million_lengths() -> None:
    lengths = np.minimum(np.random.default_rng(1).lognormal(5.5, 1.0, 1_000_000).astype(np.int64) + 1, 4096)
    packed = binpack.best_fit_decreasing(lengths, 4096)
    loads = np.bincount(packed.pack, weights=lengths)
    assert loads.max() <= 4096
    assert loads.sum() == lengths.sum()
    waste = 1 - loads.sum() / (4096 * len(loads))
    speed = rate(lambda: len(binpack.best_fit_decreasing(lengths, 4096).pack))
    note("packing, lengths at 4096", speed, seconds_a_million=1e6 / speed, waste=waste)
    assert waste <= 0.001
