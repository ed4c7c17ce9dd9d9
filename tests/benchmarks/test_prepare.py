"""`corpus prepare` as a whole: REFIT_BENCH_MB of a mixed delivery, then again, with a change, and with a source more.

The peer is datatrove's equivalent pipeline on a part of the same file, in the same run. Both are told a core: ours uses
all of them, the peer one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from refit.store import cache_folder
from tests.benchmarks.deliveries import mixed
from tests.benchmarks.table import ROOT, note, peer

pytestmark = pytest.mark.benchmark

MEGABYTES = int(os.environ.get("REFIT_BENCH_MB") or 100)
PEER_ROWS = 10_000
BASE = cache_folder() / "models" / "smollm2-135m-instruct"
RULES = "[control_characters, {name: length, args: {max_chars: 850}}, url_ratio, repeats]"
"""Drops a few more rows: where a rule takes nothing away, only what depends on its phase's own facts would run."""
PHASES = ["ingest", "clean", "tokenize", "sign", "match", "dedup", "split", "mix", "pack"]


@dataclass(frozen=True)
class Run:
    """What a run of `corpus prepare` told and took."""

    answer: dict[str, Any]
    seconds: float
    memory: int

    def ran(self) -> list[str]:
        """The phases that were not answered from the store."""
        return [phase["name"] for phase in self.answer["phases"] if not phase["cached"]]

    def columns(self) -> dict[str, float]:
        """The columns of its line of the table."""
        phases = {f"{phase['name']}_s": phase["seconds"] for phase in self.answer["phases"]}
        return {"memory_mib": self.memory / 2**20, **phases}


class Line:
    """A pipeline file over one delivery, its store, and the rows that were delivered."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sources: list[dict[str, str]] = []
        self.rows = self.deliver("mixed", MEGABYTES, seed=7)

    def deliver(self, name: str, megabytes: int, seed: int) -> int:
        """A source more."""
        path = self.folder / f"{name}.jsonl"
        self.sources.append({"name": name, "uri": path.as_uri()})
        return mixed(path, megabytes, seed)

    def prepare(self, *arguments: str) -> Run:
        """Run `corpus prepare`, from its start to its end, watching the memory of all of its processes."""
        spec = self.folder / "bench.yaml"
        data = {"sources": self.sources, "pack_length": 2048, "max_bad_ratio": 0.2}
        about = {"name": "bench", "title": "Bench", "team": "bench", "owner": "bench@example.com"}
        spec.write_text(yaml.safe_dump({**about, "data": data, "train": {"base": BASE.as_uri()}}))
        command = [ROOT / ".venv/bin/corpus", "prepare", spec, "--store", (self.folder / "store").as_uri(), *arguments]
        started, memory = time.perf_counter(), 0
        with (self.folder / "stderr").open("w") as err:
            running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True)
            while running.poll() is None:
                memory = max(memory, _memory(running.pid))
                time.sleep(0.05)
        seconds = time.perf_counter() - started
        assert running.stdout is not None
        told = running.stdout.read()
        assert running.returncode == 0, told + (self.folder / "stderr").read_text()[-2000:]
        return Run(json.loads(told.splitlines()[-1]), seconds, memory)


def _memory(pid: int) -> int:
    """The bytes that a process and all below it hold; what they share counts once (proportional set size)."""
    total = 0
    try:
        top = psutil.Process(pid)
        for process in (top, *top.children(recursive=True)):
            total += process.memory_full_info().pss
    except psutil.Error:
        pass  # it ended while we looked
    return total


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    if not (BASE / "tokenizer.json").is_file():
        pytest.skip(f"{BASE}: no base model; `make setup` makes it")
    folder = tmp_path_factory.mktemp("prepare")
    yield Line(folder)
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def first(line: Line) -> Run:
    return line.prepare()


def test_all_phases_beside_datatrove(line: Line, first: Run) -> None:
    cores = len(os.sched_getaffinity(0))
    assert first.ran() == PHASES
    ingest, *_ = first.answer["phases"]
    assert ingest["records_in"] == line.rows
    assert sum(phase["quarantined"] for phase in first.answer["phases"]) > 0
    speed = line.rows / first.seconds / cores
    theirs = peer("prepare", "datatrove", line.folder / "mixed.jsonl", PEER_ROWS, str(BASE / "tokenizer.json"))
    note(
        f"prepare, {MEGABYTES:,} MB, rows a core (datatrove)", speed, theirs,
        rows=line.rows, seconds=first.seconds, **first.columns(),
    )  # fmt: skip
    if MEGABYTES >= 100:  # below that it is the start of the doors' libraries that is measured
        assert speed > (theirs or 0)


def test_again_with_nothing_changed(line: Line, first: Run) -> None:
    again = line.prepare()
    note("prepare again, nothing changed", again.seconds, unit=" s")
    assert again.ran() == []
    assert again.answer["fingerprint"] == first.answer["fingerprint"]


@pytest.mark.usefixtures("first")
def test_again_with_one_rule_changed(line: Line) -> None:
    again = line.prepare("--set", f"data.rules={RULES}")
    note("prepare again, one rule changed", again.seconds, unit=" s", **again.columns())
    assert again.ran() == PHASES[1:]


@pytest.mark.usefixtures("first")
def test_again_with_a_source_more(line: Line) -> None:
    """The shards of the first source are there already."""
    line.deliver("added", max(1, MEGABYTES // 10), seed=8)
    again = line.prepare()
    note("prepare again, a source more", again.seconds, unit=" s", **again.columns())
    in_shards = [phase for phase in again.answer["phases"] if "shards" in phase]
    assert [phase["name"] for phase in in_shards] == PHASES[:5]
    # What is near to what is asked again, of the signatures that are there.
    assert all(0 < phase["shards_made"] < phase["shards"] for phase in in_shards if phase["name"] != "match")
    assert "pack" in again.ran()
