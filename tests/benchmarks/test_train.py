"""The training stage on the small model, 2 ranks on gloo: `make bench-train`, one table and bench-train.json.

Everything is measured from outside, on the program as people call it. Where two things are compared they take turns on
the same processors (`turns.py`), and only ratios are asserted; figures that depend on the machine are printed beside
their aim, and one that misses it says so. STEPS= scales it: about so many steps a side.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the training stage's benchmarks run in .venv-compute, by `make bench-train`")

from refit import packed
from refit.fingerprint import file_digest
from refit.manifest import Manifest
from refit.packed import WHOLE
from refit.store import store_for
from tests.benchmarks.table import ROOT, note
from tests.benchmarks.turns import Player, play, ratio
from tests.train.conftest import SPEC

pytestmark = pytest.mark.benchmark

STEPS = int(os.environ.get("REFIT_BENCH_STEPS") or 1000)
TURNS = max(4, STEPS // 60)
TURN_SECONDS = 2.0
RESTARTS = max(3, STEPS // 50)
SAVE_SECONDS = 10
SAVES = max(2, STEPS // 250)
RECIPE = {
    "max_steps": 10_000_000, "micro_batch": 4, "accumulation": 4, "zero_stage": 1, "hang_seconds": 3600,
    "checkpoint": {"every_minutes": 600}, "ranks": 2, "schedule": "constant", "learning_rate": 1e-3,
}  # fmt: skip
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}


class Place:
    """A folder with a base model and datasets, and trainings in it."""

    def __init__(self, root: Path) -> None:
        import tickets

        from trainer.seed import seed

        self.root, self._started = root, list[Player]()
        base = (root / "models" / "seed").as_uri()
        seed(base, [tickets.corpus(root / "corpus.jsonl")])
        self.base = store_for(base).local(base)
        tickets.dataset((root / "packed").as_uri(), self.base)
        self.spec = root / "tickets.json"
        spec = {**_yaml(SPEC.format(base=base)), "train": {"base": base, "method": "full", **RECIPE}}
        self.spec.write_text(json.dumps(spec))

    def training(self, name: str, data: str = "packed", **train: Any) -> Player:
        """`trainer run`, under way; done are its steps."""
        output = self.root / name
        sets = [part for key, value in train.items() for part in ("--set", f"train.{key}={value}")]
        argv = [
            sys.executable, "-m", "trainer", "run", self.spec, "--data", (self.root / data).as_uri(),
            "--output", output.as_uri(), *sets,
        ]  # fmt: skip
        return self._start(name, argv, record := output / "metrics.jsonl", lambda: _lines(record))

    def bare(self) -> Player:
        """The bare DeepSpeed loop on two ranks; done are its steps."""
        folder = self.root / "bare"
        folder.mkdir()
        program = [sys.executable, Path(__file__).with_name("bare_deepspeed.py")]
        one = " ".join(map(str, [*program, self.spec, self.root / "packed", self.base, folder]))
        ranks = "; ".join(f"RANK={rank} LOCAL_RANK={rank} WORLD_SIZE=2 {one} &" for rank in (0, 1)).replace("&;", "&")
        steps = folder / "steps"
        argv = ["/bin/sh", "-c", f"{ranks} wait"]
        return self._start("bare", argv, steps, lambda: steps.stat().st_size if steps.exists() else 0)

    def records(self, name: str) -> list[dict[str, Any]]:
        """The steps of a training."""
        lines = (self.root / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]

    def invent(self, name: str, samples: int, each: int = 12) -> None:
        """A dataset of so many documents of `each` invented tokens, the last three of each learnt."""
        length, rng = 128, np.random.default_rng(1)
        a_pack = length // each
        packs = samples // a_pack
        segments = np.zeros((packs, length), np.uint16)
        segments[:, : a_pack * each] = np.repeat(np.arange(1, a_pack + 1), each)
        mask = np.where((np.arange(length) % each >= each - 3) & (segments > 0), WHOLE, 0)
        tokens = np.where(segments > 0, rng.integers(3, 300, segments.shape, np.uint16), 0)
        uri = (self.root / name).as_uri()
        with store_for(uri).publish(uri) as draft:
            for split, rows in (("train", packs), ("validation", 8)):
                packed.write(
                    draft.path, split, tokens=tokens[:rows], segments=segments[:rows], mask=mask[:rows],
                    vocabulary=file_digest(self.base / "tokenizer.json"), vocabulary_size=300, samples=rows * a_pack,
                )  # fmt: skip
            draft.commit(Manifest(kind="dataset", fingerprint="invented"))

    def end(self) -> None:
        """Nothing is left running."""
        for player in self._started:
            player.end()
        self._started.clear()

    def _start(self, name: str, argv: list[Any], record: Path, done: Callable[[], int]) -> Player:
        log = (self.root / f"{name}.log").open("ab")
        process = subprocess.Popen(argv, stdout=log, stderr=log, env=ENVIRONMENT, cwd=ROOT)
        self._started.append(Player(name, process, record, done))
        return self._started[-1]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("bench"))


@pytest.fixture
def place(made: Place) -> Iterator[Place]:
    yield made
    made.end()


def tell(name: str, figure: float, unit: str, aim: float, *, peer: float | None = None, **more: float | str) -> None:
    """A line of the table whose figure should be no more than its aim."""
    note(name, figure, peer, unit, aim=f"<= {aim:g}{unit}", **more, verdict="met" if figure <= aim else "MISSED")


def test_our_loop_beside_a_bare_deepspeed_loop(place: Place) -> None:
    ours, bare = place.training("ours"), place.bare()
    play([ours, bare], TURNS, TURN_SECONDS)
    share, error = ratio(ours, bare)
    tell(
        "loop: slower than a bare DeepSpeed loop", 100 * (1 - share), " %", 2,
        ours_a_second=statistics.median(ours.rates), bare_a_second=statistics.median(bare.rates),
        error=100 * error, turns=TURNS,
    )  # fmt: skip
    records = _not_held(place.records("ours")[3:])
    waited, whole = (sum(record[name] for record in records) for name in ("data", "seconds"))
    tell("loop: waiting for data", 100 * waited / whole, " %", 1, steps=len(records))
    assert share > 0.8
    assert waited / whole < 0.1


def _not_held(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps in which the program was not held while the other one had its turn."""
    usual = statistics.median(record["seconds"] for record in records)
    return [record for record in records if record["seconds"] < usual + TURN_SECONDS / 2]


def test_time_spent_in_saving(place: Place) -> None:
    saving = place.training("saving", **{"checkpoint.every_minutes": SAVE_SECONDS / 60})
    saving.ready(1)
    deadline = time.monotonic() + 20 * SAVES * SAVE_SECONDS
    while sum("save" in record for record in place.records("saving")) < SAVES:
        assert saving.process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.2)
    records = place.records("saving")
    held = [record["save"] for record in records if "save" in record]
    whole = sum(record["seconds"] for record in records) + sum(held)
    tell(
        f"saving every {SAVE_SECONDS} s: the loop is held up", 100 * sum(held) / whole, " %", 0.5,
        saves=len(held), longest_seconds=max(held),
    )  # fmt: skip
    assert sum(held) / whole < 0.1


def test_packed_beside_one_document_a_pack(place: Place) -> None:
    import tickets

    documents = tickets.documents(place.base, 400)
    rows = [tickets.pack([document], tickets.LENGTH) for document in documents]
    tokens, segments, mask = (np.concatenate(column) for column in zip(*rows, strict=True))
    uri = (place.root / "unpacked").as_uri()
    with store_for(uri).publish(uri) as draft:
        for split in ("train", "validation"):
            packed.write(
                draft.path, split, tokens=tokens, segments=segments, mask=mask, samples=len(documents),
                vocabulary=file_digest(place.base / "tokenizer.json"), vocabulary_size=int(tokens.max()) + 1,
            )  # fmt: skip
        draft.commit(Manifest(kind="dataset", fingerprint="unpacked"))
    players = [place.training("as-packed"), place.training("as-unpacked", "unpacked")]
    play(players, max(4, TURNS // 4), TURN_SECONDS)
    speeds = []
    for player in players:
        records = place.records(player.name)
        speeds.append(statistics.median(player.rates) * statistics.mean(record["tokens"] for record in records))
    note("packed: tokens a second (one document a pack)", *speeds)
    assert speeds[0] > speeds[1]


def test_restart_to_the_first_step_at_a_thousand_and_a_million_samples(place: Place) -> None:
    """Each restart reads a checkpoint and takes a step; then it is killed."""
    sizes = {"1,000": 1_000, "1,000,000": 1_000_000}
    for name, samples in sizes.items():
        place.invent(f"of-{name}", samples)
        first = place.training(f"restart-{name}", f"of-{name}", **{"checkpoint.every_steps": 4})
        first.ready(5)
        first.end()
    own: dict[str, list[float]] = {name: [] for name in sizes}
    imports: list[float] = []
    for _ in range(RESTARTS):
        for name in sizes:
            whole, importing = _restart(place, name)
            own[name].append(whole - importing)
            imports.append(importing)
    for name, seconds in own.items():
        tell(
            f"restart to first step, {name} samples, own work, p95", _p95(seconds), " s", 5,
            median=statistics.median(seconds), restarts=len(seconds), imports_median=statistics.median(imports),
        )  # fmt: skip
    middle = {name: statistics.median(seconds) for name, seconds in own.items()}
    more = middle["1,000,000"] / middle["1,000"]
    tell("restart: a million samples as a share of a thousand", more, "", 1.1)
    assert more < 2


def _restart(place: Place, name: str) -> tuple[float, float]:
    """Seconds from the call to the first step's record, and how many of them were imports, by Python's own clock."""
    output = place.root / f"restart-{name}"
    newest = max(int(path.name.partition("-")[2]) for path in (output / "checkpoints").glob("step-*"))
    lines = (output / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (output / "metrics.jsonl").write_bytes(b"".join(lines[:newest]))
    shutil.rmtree(output / "ranks", ignore_errors=True)
    log = place.root / f"{output.name}.log"
    log.unlink(missing_ok=True)
    ENVIRONMENT["PYTHONPROFILEIMPORTTIME"] = "1"
    try:
        began = time.perf_counter()
        again = place.training(output.name, f"of-{name}", **{"checkpoint.every_steps": 1000})
    finally:
        del ENVIRONMENT["PYTHONPROFILEIMPORTTIME"]
    while again.done() <= newest:
        assert again.process.poll() is None, log.read_text()[-2000:]
        time.sleep(0.005)
    whole = time.perf_counter() - began
    again.end()
    return whole, _imported(log) + max(map(_imported, (output / "ranks").glob("rank-*.log")))


def _imported(log: Path) -> float:
    """Seconds of a process's imports: `import time: self [us] | cumulative | name`, where nothing imports the name."""
    seconds = 0.0
    for line in log.read_text(errors="replace").splitlines():
        parts = line.removeprefix("import time:").split("|")
        if len(parts) == 3 and parts[1].strip().isdigit() and parts[2].startswith(" ") and parts[2][1:2] != " ":
            seconds += int(parts[1]) / 1e6
    return seconds


def _p95(values: list[float]) -> float:
    return float(np.quantile(values, 0.95))


def _lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.is_file() else 0


def _yaml(text: str) -> dict[str, Any]:
    import yaml

    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded
