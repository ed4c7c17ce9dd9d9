"""Near dedup from file to file, beside the libraries that do it, in one run.

REFIT_BENCH_DOCS documents of about 1 KB, a tenth of them a former one with one to three words changed. The peers get as
many of them as they do in a minute or so; none of them verifies its pairs.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.benchmarks.test_data import note

pytestmark = pytest.mark.benchmark

ROOT = Path(__file__).parents[2]
COUNT = int(os.environ.get("REFIT_BENCH_DOCS") or 200_000)
PEERS = {"datasketch": 20_000, "rensa": 100_000, "daft": 200_000}
PLANTED = 0.1
SYLLABLES = [a + b for a in "bcdfghklmnprstvw" for b in ("a", "e", "i", "o", "u", "an", "er", "in", "on")]


def documents(count: int, seed: int = 7) -> Iterator[tuple[str, int | None]]:
    """Texts of made-up words with an English-like law of frequencies, and which former one a text is a copy of."""
    rng, chooser = np.random.default_rng(seed), random.Random(seed)
    words = ["".join(chooser.choices(SYLLABLES, k=chooser.choice((1, 2, 2, 3)))) for _ in range(30_000)]
    law = np.cumsum(1 / np.arange(2, len(words) + 2) ** 0.9)
    originals: list[tuple[int, list[str]]] = []
    for number in range(count):
        if originals and chooser.random() < PLANTED:
            former, words_of_it = chooser.choice(originals)
            text = list(words_of_it)
            for _ in range(chooser.randint(1, 3)):
                text[chooser.randrange(len(text))] = chooser.choice(words)
            yield " ".join(text), former
        else:
            picked = np.searchsorted(law, rng.random(int(rng.integers(120, 200))) * law[-1])
            text = [words[place] for place in picked.tolist()]
            originals.append((number, text))
            yield " ".join(text), None


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The documents as jsonl, and the planted pairs of at least 0.85 exact similarity."""
    path = tmp_path_factory.mktemp("bench") / "documents.jsonl"
    pairs = {}
    kept: dict[int, set[tuple[str, ...]]] = {}
    with path.open("w", encoding="utf-8") as handle:
        for number, (text, former) in enumerate(documents(COUNT)):
            handle.write(json.dumps({"id": f"{number:08d}", "text": text}) + "\n")
            if number < 100_000:  # pairs are judged on the first texts: their sets fit into memory
                kept[number] = grams(text)
                if former is not None and similarity(kept[number], kept[former]) >= 0.85:
                    pairs[f"{number:08d}"] = f"{former:08d}"
    return path, pairs


def grams(text: str) -> set[tuple[str, ...]]:
    words = text.split()
    return {tuple(words[at : at + 5]) for at in range(len(words) - 4)}


def similarity(left: set[tuple[str, ...]], right: set[tuple[str, ...]]) -> float:
    return len(left & right) / len(left | right)


def ours(path: Path, runs: int = 3) -> list[dict[str, float]]:
    """What `corpus dedup` says of some runs, each a process of its own."""
    found = []
    for _ in range(runs + 1):
        done = subprocess.run(
            [ROOT / ".venv/bin/corpus", "dedup", path, "--output", path.parent / "out"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        found.append(json.loads(done.stdout.splitlines()[-1]))
    return found[1:]


def test_near_dedup_from_file_to_file(file: tuple[Path, dict[str, str]]) -> None:
    path, planted = file
    told = ours(path)
    speed = statistics.median(one["documents_per_second"] for one in told)
    best = 0.0
    python = ROOT / ".venv-peers/bin/python"
    for name, count in PEERS.items() if python.exists() else ():
        done = subprocess.run(
            [python, Path(__file__).parent / "peers.py", name, path, str(min(count, COUNT))],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        answer = json.loads(done.stdout.splitlines()[-1])
        theirs = answer["documents"] / answer["seconds"]
        note(f"near dedup, {COUNT:,} documents ({name})", speed, theirs)
        best = max(best, theirs)
    if not best:
        print("\nno peers: `make bench-data` makes their venv")
        note(f"near dedup, {COUNT:,} documents", speed)
    clusters = pq.read_table(path.parent / "out" / "clusters.parquet").to_pylist()
    linked = {row["id"]: row["cluster"] for row in clusters if row["id"] != row["cluster"]}
    found = sum(linked.get(copy) == former for copy, former in planted.items())
    text_bytes = path.stat().st_size
    memory = statistics.median(one["peak_memory_bytes"] for one in told)
    print(f"\nrecall of planted pairs at J >= 0.85: {found / max(1, len(planted)):.4f} of {len(planted):,}")
    print(f"memory at the peak: {memory / 2**20:,.0f} MiB, the file {text_bytes / 2**20:,.0f} MiB")
    assert found >= 0.99 * len(planted)
    assert speed > best
