"""Near dedup from file to file, beside the libraries that do it, in one run.

REFIT_BENCH_DOCS documents of about 1 KB, a tenth of them a former one with one to three words changed. The peers get as
many of them as they do in a minute or so; none of them verifies its pairs.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from refit.spec import Dedup
from tests.benchmarks.documents import Language, Planted, chinese, english, f1
from tests.benchmarks.table import ROOT, note, peer

pytestmark = pytest.mark.benchmark

COUNT = int(os.environ.get("REFIT_BENCH_DOCS") or 200_000)
PEERS = {"datasketch": 20_000, "rensa": 100_000, "daft": 200_000, "datatrove": 3_000}
BYTES_BESIDE = 250
"""What the work may take a document beside its text, once the documents outweigh the program."""


def ours(file: Path, runs: int = 3) -> dict[str, float]:
    """What `corpus dedup` says, each number the median of some runs, each a process of its own."""
    told: list[dict[str, float]] = []
    for _ in range(runs + 1):
        done = subprocess.run(
            [ROOT / ".venv/bin/corpus", "dedup", file, "--output", file.parent / "out"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        told.append(json.loads(done.stdout.splitlines()[-1]))
    return {name: statistics.median(one[name] for one in told[1:]) for name in told[0]}


def measured(folder: Path, language: Language, name: str) -> tuple[float, Planted]:
    """Documents a second on a file of a language; what was found must be what was planted."""
    planted = Planted.write(folder / f"{name}.jsonl", COUNT, language)
    told = ours(planted.path)
    clusters = pq.read_table(folder / "out" / "clusters.parquet").to_pylist()
    linked = {row["id"]: row["cluster"] for row in clusters if row["id"] != row["cluster"]}
    recall, precision = planted.judge(linked, Dedup().threshold)
    note(
        f"near dedup, {COUNT:,} documents, {name}", told["documents_per_second"], recall=recall, precision=precision,
        f1=f1(recall, precision), planted_pairs=len(planted.pairs), memory_mib=told["peak_memory_bytes"] / 2**20,
        bytes_beside_the_text=(told["peak_memory_bytes"] - planted.text_bytes) / COUNT,
    )  # fmt: skip
    assert f1(recall, precision) >= 0.99
    if COUNT >= 1_000_000:
        assert told["peak_memory_bytes"] <= planted.text_bytes + BYTES_BESIDE * COUNT
    return told["documents_per_second"], planted


@pytest.fixture(scope="module")
def on_english(tmp_path_factory: pytest.TempPathFactory) -> tuple[float, Planted]:
    return measured(tmp_path_factory.mktemp("bench"), english(), "English")


def test_near_dedup_from_file_to_file(on_english: tuple[float, Planted]) -> None:
    speed, planted = on_english
    best = 0.0
    for name, count in PEERS.items():
        theirs = peer("near", name, planted.path, min(count, COUNT))
        note(f"near dedup, {COUNT:,} documents ({name})", speed, theirs)
        best = max(best, theirs or 0)
    assert speed > best


def test_near_dedup_of_chinese_beside_english(on_english: tuple[float, Planted], tmp_path: Path) -> None:
    """Twice the n-grams a byte: every character is a word."""
    speed, _ = measured(tmp_path, chinese(), "Chinese")
    note("near dedup, Chinese as a share of English", speed / on_english[0], unit="")
    assert speed >= 0.6 * on_english[0]
