"""The stage as people meet it: `corpus prepare`, run again, after a change, by a job document, on S3."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from refit.job import Job
from refit.pipeline import load
from refit.store import store_for

if TYPE_CHECKING:
    from tests.data.conftest import Line

PHASES = ["ingest", "clean", "tokenize", "sign", "match", "dedup", "split", "mix", "pack"]


def ran(answer: dict[str, Any]) -> list[str]:
    return [phase["name"] for phase in answer["phases"] if not phase["cached"]]


def test_the_dataset_holds_what_training_and_evaluation_read(small: Line) -> None:
    code, answer = small.prepare()
    assert code == 0
    assert set(answer) == {"manifest", "fingerprint", "phases"}
    assert [phase["name"] for phase in answer["phases"]] == PHASES
    folder = Path(answer["manifest"].removeprefix("file://")).parent
    assert folder.name == answer["fingerprint"]
    assert small.manifest(folder).kind == "dataset"
    heldout = small.rows(folder, "heldout.parquet")
    assert list(heldout[0]) == ["id", "user", "domain", "label", "messages", "answer"]
    assert 20 < len(heldout) < 80
    for item in heldout:
        system, question = json.loads(item["messages"])
        assert system == {"role": "system", "content": "Name the mood as JSON."}
        assert question["role"] == "user"
        assert json.loads(item["answer"])["mood"] == item["label"]
    assert (folder / "data_docs" / "index.html").is_file()
    assert {file.name for file in folder.iterdir()} >= {"train.json", "validation.json", "quarantine.parquet"}


def test_its_manifest_tells_counts_shares_seeds_and_versions(small: Line) -> None:
    facts = small.manifest(small.dataset()).facts
    assert [phase["name"] for phase in facts["before"]] == PHASES[:-1]
    told = {phase["name"]: phase for phase in facts["before"]}
    assert told["ingest"]["sources"]["mail"] == {"read": 100, "kept": 100}
    assert told["clean"]["rules"]["length"]["dropped"] == 0
    shares = {name: share["share"] for name, share in told["mix"]["shares"].items()}
    assert shares == pytest.approx({"mail": 0.5, "chat": 0.25, "calls": 0.25}, abs=0.01)
    tokens = {name: share["share"] for name, share in facts["tokens"]["train"]["sources"].items()}
    assert tokens == pytest.approx(shares, abs=0.05)
    assert facts["seed"] == 1
    assert facts["versions"]["tokenizers"]
    assert facts["served_differently"]["count"] == 0


def test_run_again_everything_is_answered_and_forced_it_comes_out_the_same(small: Line) -> None:
    first = small.dataset()
    before = small.manifest(first)
    code, answer = small.prepare()
    assert (code, ran(answer)) == (0, [])
    code, answer = small.prepare("--force")
    assert (code, ran(answer)) == (0, PHASES)
    after = small.manifest(first)
    assert after.created > before.created
    assert after.files == before.files


def test_an_answer_from_the_store_loads_no_library_that_it_does_not_need(small: Line) -> None:
    small.dataset()
    program = (
        "import sys; from corpus.cli import main; assert main(sys.argv[1:]) == 0; "
        "print(sorted({'great_expectations', 'numba', 'tokenizers', 'pandas'} & set(sys.modules)))"
    )
    arguments = ["prepare", str(small.folder / "small.yaml"), "--store", small.store]
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    answer, loaded = done.stdout.splitlines()
    assert ran(json.loads(answer)) == []
    assert loaded == "[]"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("data.rules=[control_characters, {name: length, args: {max_chars: 42}}]", PHASES[1:]),
        ("data.split.salt=other", PHASES[6:]),
        ("data.sources=WEIGHT", PHASES[7:]),
        ("data.drill=shuffle_labels", PHASES[7:]),
        ("data.pack_length=96", PHASES[8:]),
        ("train.max_steps=7", []),
        ("rollout.margin=0.2", []),
    ],
)
def test_a_change_runs_what_depends_on_it(small: Line, change: str, expected: list[str]) -> None:
    small.data["max_bad_ratio"] = 1.0
    small.dataset()
    if change.endswith("WEIGHT"):
        small.data["sources"][0]["weight"] = 5
        code, answer = small.prepare()
    else:
        code, answer = small.prepare("--set", change)
    assert code == 0, answer
    assert ran(answer) == expected


def test_the_address_of_a_delivery_does_not_count_and_its_content_does(small: Line) -> None:
    small.dataset()
    (small.folder / "raw" / "mail").rename(small.folder / "raw" / "post")
    small.data["sources"][0]["uri"] = f"file://{small.folder}/raw/post"
    assert ran(small.prepare()[1]) == []
    path = small.folder / "raw" / "post" / "part.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    assert ran(small.prepare()[1]) == PHASES


def test_a_folder_that_lost_a_file_is_made_again(small: Line) -> None:
    folder = small.dataset()
    (folder / "train.tokens.bin").unlink()
    code, answer = small.prepare()
    assert (code, ran(answer)) == (0, ["pack"])
    assert (folder / "train.tokens.bin").is_file()


def test_only_runs_one_phase_and_says_what_is_missing(small: Line) -> None:
    code, answer = small.prepare("--only", "clean")
    assert code == 10
    assert "ingest, has not run" in answer["message"]
    code, answer = small.prepare("--only", "ingest")
    assert (code, ran(answer)) == (0, ["ingest"])
    code, answer = small.prepare("--only", "clean")
    assert (code, ran(answer)) == (0, ["clean"])
    assert [phase["name"] for phase in answer["phases"]] == ["ingest", "clean"]


def test_the_same_work_by_a_job_document(small: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = small.prepare()[1]["fingerprint"]
    spec = load(small.folder / "small.yaml")
    job = Job.build("prepare", spec, store=small.store, output=f"{small.store}/jobs/small/run1/prepare")
    monkeypatch.setenv("REFIT_JOB", job.save())
    code, answer = small.corpus()
    assert code == 0
    assert answer["outputs"] == {"dataset": f"{small.store}/datasets/small/pack/{expected}"}
    status = json.loads(store_for(job.output).read(f"{job.output}/status.json"))
    assert (status["phase"], status["done"]) == ("done", 9)


def test_inspect_shows_a_folder(small: Line) -> None:
    uri = small.prepare()[1]["manifest"]
    code, answer = small.corpus("inspect", uri)
    assert (code, answer["kind"]) == (0, "dataset")
    assert small.corpus("inspect", uri.removesuffix("/manifest.json"))[1] == answer
    assert small.corpus("inspect", "file:///nowhere")[0] == 10


def test_a_dataset_is_made_on_s3_as_it_is_on_a_disk(small: Line, bucket: str) -> None:
    local = small.manifest(small.dataset())
    small.store = f"{bucket}/store"
    code, answer = small.prepare()
    assert (code, ran(answer)) == (0, PHASES)
    uri = answer["manifest"].removesuffix("/manifest.json")
    there = store_for(uri).manifest(uri)
    assert there
    assert there.files == local.files
    assert ran(small.prepare()[1]) == []
