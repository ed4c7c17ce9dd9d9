"""What the mirror needs no server for; the rest is in tests/integration/test_registry.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from operators import registry
from refit.manifest import Manifest
from refit.release import Release
from refit.spec import Serve

RELEASE = Release(
    id="r" * 16, pipeline="tiny", digest="d" * 64, model="file:///m", profile=Serve(), team="support", owner="o"
)


def test_importing_the_mirror_imports_neither_mlflow_nor_airflow():
    heavy = "import sys, operators.registry; print(sorted({'mlflow', 'airflow', 'pandas'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_release_that_nobody_compared_has_no_scores_and_no_verdict():
    tags = registry.tags_of(RELEASE, {})
    assert not any("score" in name or "verdict" in name for name in tags)
    assert registry.scores_of({}) == {}


def test_a_forced_verdict_is_seen_on_the_version():
    facts = {"verdict": "pass", "forced": True, "candidate": {"score": 0.2, "low": None}}
    tags = registry.tags_of(RELEASE, {"comparison": Manifest(kind="comparison", fingerprint="c", facts=facts)})
    assert (tags["refit.verdict"], tags["refit.forced"], tags["refit.score"]) == ("pass", "true", "0.2000")
    assert "refit.score_low" not in tags


def test_a_version_tells_what_its_training_began_with():
    training = Manifest(kind="train", fingerprint="t", inputs={"dataset": "d1", "warm_start": "c1"})
    tags = registry.tags_of(RELEASE, {"training": training})
    assert (tags["refit.dataset"], tags["refit.warm_start"]) == ("d1", "c1")


def test_a_folder_is_linked_whole_or_not_at_all(tmp_path: Path):
    folder, target = tmp_path / "model", tmp_path / "run" / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "a").write_text("a")
    (folder / "sub" / "b").write_text("b")
    registry._link(folder, target)
    registry._link(folder, target)  # again: nothing happens
    assert target.joinpath("sub", "b").samefile(folder / "sub" / "b")
    assert os.listdir(target.parent) == ["model"]
