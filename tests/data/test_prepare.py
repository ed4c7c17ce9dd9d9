"""The stage as people meet it: `corpus prepare`, run again, after a change, and on bad deliveries."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from refit.job import Job
from refit.manifest import Manifest
from refit.pipeline import load
from refit.store import store_for

if TYPE_CHECKING:
    from tests.data.conftest import Line, Sentences

PHASES = ["ingest", "clean", "dedup", "split", "mix", "pack"]


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(folder / name).to_pylist()
    return found


def ran(answer: dict[str, Any]) -> list[str]:
    return [phase["name"] for phase in answer["phases"] if not phase["cached"]]


def manifest(folder: Path) -> Manifest:
    found = store_for("file:///").manifest(folder.as_uri())
    assert found
    return found


def phase_folder(folder: Path, phase: str) -> Path:
    (found,) = (folder.parents[1] / phase).iterdir()
    return found


def test_the_dataset_holds_what_training_and_evaluation_read(small: Line) -> None:
    code, answer = small.prepare()
    assert code == 0
    assert set(answer) == {"manifest", "fingerprint", "phases"}
    assert [phase["name"] for phase in answer["phases"]] == PHASES
    folder = Path(answer["manifest"].removeprefix("file://")).parent
    assert folder.name == answer["fingerprint"]
    assert manifest(folder).kind == "dataset"
    heldout = rows(folder, "heldout.parquet")
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
    facts = manifest(small.dataset()).facts
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
    before = manifest(first)
    code, answer = small.prepare()
    assert (code, ran(answer)) == (0, [])
    code, answer = small.prepare("--force")
    assert (code, ran(answer)) == (0, PHASES)
    after = manifest(first)
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
        ("data.split.salt=other", PHASES[3:]),
        ("data.sources=WEIGHT", PHASES[4:]),
        ("data.drill=shuffle_labels", PHASES[4:]),
        ("data.pack_length=96", PHASES[5:]),
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
    assert (status["phase"], status["done"]) == ("done", 6)


def test_inspect_shows_a_folder(small: Line) -> None:
    uri = small.prepare()[1]["manifest"]
    code, answer = small.corpus("inspect", uri)
    assert (code, answer["kind"]) == (0, "dataset")
    assert small.corpus("inspect", uri.removesuffix("/manifest.json"))[1] == answer
    assert small.corpus("inspect", "file:///nowhere")[0] == 10


def test_bad_records_go_to_quarantine_with_their_place_and_the_run_goes_on(small: Line) -> None:
    path = small.folder / "raw" / "mail" / "part.jsonl"
    good = path.read_text()
    empty = json.dumps({"instruction": "...", "input": "", "output": '{"mood": "good"}'})
    path.write_text('{"instruction": \n' + good + empty + "\n" + json.dumps({"x": "\udcb2"}) + "\n")
    found = rows(small.dataset(), "quarantine.parquet")
    assert [(row["source"], row["file"], row["line"]) for row in found] == [
        ("mail", "part.jsonl", 1),
        ("mail", "part.jsonl", 103),
        ("mail", "part.jsonl", 102),
    ]
    assert [row["reason"].partition(":")[0] for row in found] == ["not JSON", "unknown format", "length"]
    assert found[0]["sample"].startswith('{"instruction": ')


def test_too_many_bad_records_stop_the_run_with_the_commonest_reasons(small: Line) -> None:
    with (small.folder / "raw" / "mail" / "part.jsonl").open("a") as handle:
        handle.write("garbage\n" * 30)
    code, answer = small.prepare()
    assert (code, answer["error"]) == (10, "BadRecords")
    assert (
        "30 of 270 records are bad (11.1%); data.max_bad_ratio allows 5.0%. Commonest: not JSON (30)."
        in (answer["message"])
    )
    kept = answer["message"].partition("Each is in file://")[2].partition(". Mend")[0]
    assert len(rows(Path(kept).parent, "quarantine.parquet")) == 30
    assert small.prepare("--set", "data.max_bad_ratio=0.2")[0] == 0


def test_the_log_stays_readable_with_fifty_thousand_bad_lines(small: Line) -> None:
    with (small.folder / "raw" / "mail" / "part.jsonl").open("a") as handle:
        handle.write("garbage\n" * 50_000)
    code, answer = small.prepare()
    assert code == 10
    assert len(small.stderr.splitlines()) < 20
    assert len(answer["message"]) < 500


@pytest.mark.parametrize(
    ("content", "file", "why"),
    [
        (b"", "x.jsonl", "0 rows"),
        (b"[]", "x.json", "0 rows"),
        (b"note,reply\n", "x.csv", "0 rows"),
        (bytes(range(256)) * 50, "x.jsonl", "none of its 1 rows is a record of format auto. Why: binary"),
        (b"lorem ipsum\n" * 40, "x.jsonl", "none of its 40 rows is a record of format auto. Why: not JSON (40)"),
        (b'{"a": 1}\n' * 3, "x.jsonl", "none of its 3 rows is a record of format auto. Why: unknown format (3)"),
        (b"x", "README.md", "holds no data file"),
    ],
)
def test_a_source_that_holds_nothing_is_told_at_once(small: Line, content: bytes, file: str, why: str) -> None:
    small.deliver("empty", content, file)
    code, answer = small.prepare()
    assert code == 10
    assert why in answer["message"]
    assert "data.sources[3]" in answer["message"]


def test_what_is_missing_or_unknown_is_told_before_any_work(small: Line) -> None:
    code, answer = small.prepare("--set", "data.rules=[lenght]")
    assert (code, answer["error"]) == (10, "BadSpec")
    assert "Did you mean length?" in answer["message"]
    small.data["sources"][0]["uri"] += "/nowhere"
    code, answer = small.prepare()
    assert code == 10
    assert "small.yaml: data.sources[0].uri" in answer["message"]
    assert not (small.folder / "store" / "datasets").exists()


def test_an_answer_without_the_label_key_is_bad(small: Line) -> None:
    small.data["max_bad_ratio"] = 1.0
    small.deliver("chatty", [{"prompt": f"how are you number {n}", "completion": "fine"} for n in range(3)], weight=0)
    small.deliver("chatty", [{"prompt": "and you", "completion": '{"mood": "good"}'}], "more.jsonl")
    reasons = {row["reason"] for row in rows(small.dataset(), "quarantine.parquet")}
    assert reasons == {"the answer is not JSON with 'mood'"}


def test_a_session_over_many_files_is_on_one_side_and_no_question_on_two(line: Line, texts: Sentences) -> None:
    many = texts(200)
    for part in range(4):
        delivered = [
            {"prompt": text, "completion": f'{{"mood": "{part}"}}', "session": f"s{n % 20}", "user": f"u{n % 20}"}
            for n, text in enumerate(many)
            if n % 4 == part or n % 10 == 0
        ]
        line.deliver("chats", delivered, f"part{part}.jsonl")
    folder = line.dataset()
    sides: dict[str, set[str]] = defaultdict(set)
    asked: dict[str, set[str]] = defaultdict(set)
    for row in rows(phase_folder(folder, "split"), "records.parquet"):
        sides[row["session"]].add(row["split"])
        asked[json.loads(row["messages"])[1]["content"]].add(row["split"])
    assert len(sides) == 20
    assert all(len(where) == 1 for where in [*sides.values(), *asked.values()])
    assert {item["user"] for item in rows(folder, "heldout.parquet")} <= {f"u{n}" for n in range(20)}


def test_a_question_asked_in_two_sessions_is_taken_out_of_training(line: Line, texts: Sentences) -> None:
    line.data.update(label_key=None, dedup={"threshold": 1.0})
    asked = [
        {"prompt": text, "completion": f"{said} {n}", "session": f"{said}{n}"}
        for said in ("yes", "no")
        for n, text in enumerate(texts(100))
    ]
    line.deliver("chats", asked)
    folder = line.dataset()
    went = rows(phase_folder(folder, "split"), "removed.parquet")
    assert went
    assert {row["how"] for row in went} == {"exact"}
    kept = {row["id"]: row for row in rows(phase_folder(folder, "split"), "records.parquet")}
    assert {kept[row["kept"]]["split"] for row in went} <= {"validation", "heldout"}


def test_the_drill_spoils_training_and_leaves_the_exam_right(small: Line) -> None:
    honest = small.dataset()
    spoilt = small.dataset("--set", "data.drill=shuffle_labels")
    assert spoilt != honest
    assert rows(spoilt, "heldout.parquet") == rows(honest, "heldout.parquet")
    told = next(phase for phase in manifest(spoilt).facts["before"] if phase["name"] == "mix")
    assert told["drill"] == "shuffle_labels"
    (mixed,) = (path for path in (spoilt.parents[1] / "mix").iterdir() if path.name == told["fingerprint"])
    wrong = 0
    for row in rows(mixed, "train.parquet"):
        messages = json.loads(row["messages"])
        wrong += json.loads(messages[2]["content"])["mood"] != ("good", "bad")[len(messages[1]["content"]) % 2]
    assert wrong > 30


def test_max_records_limits_every_source(small: Line) -> None:
    facts = manifest(small.dataset("--set", "data.max_records=40")).facts
    assert [source["read"] for source in facts["before"][0]["sources"].values()] == [40, 40, 40]


def test_what_is_longer_than_a_pack_is_refused_and_a_plain_text_is_cut(line: Line, texts: Sentences) -> None:
    line.data.update(label_key=None, pack_length=48, system="")
    line.data["max_bad_ratio"] = 0.5
    line.deliver("talk", [{"prompt": text, "completion": "fine"} for text in texts(60)], weight=0.9)
    long = [{"prompt": " ".join(texts(90)[n : n + 9]), "completion": "a long one"} for n in range(0, 90, 9)]
    line.deliver("talk", long, "long.jsonl")
    books = [" ".join(texts(80)[n : n + 8]) for n in range(0, 80, 8)]
    line.deliver("books", "\n".join(books), "book.txt", weight=0.1)
    folder = line.dataset()
    bad = rows(folder, "quarantine.parquet")
    assert {row["file"] for row in bad} == {"long.jsonl"}
    assert all(row["reason"].startswith("longer than a pack: ") for row in bad)
    assert all(row["reason"].endswith("data.pack_length is 48") for row in bad)
    facts = manifest(folder).facts
    assert facts["tokens"]["train"]["sources"]["books"]["tokens"] > 48


def test_the_door_says_which_expectation_is_not_met(small: Line) -> None:
    code, answer = small.prepare("--set", "data.expect.min_records=1000")
    assert (code, answer["error"]) == (10, "BadRecords")
    assert "records.table: table row count to be between min_value 1000; found 2" in answer["message"]
    code, answer = small.prepare("--set", "data.expect.labels=[good, fair]")
    assert code == 10
    assert "records.label: column values to be in set" in answer["message"]
    assert "['bad']" in answer["message"]
    code, answer = small.prepare("--set", "data.expect.max_label_share=0.3")
    assert "labels.share: column max to be between max_value 0.3; found 0.5" in answer["message"]


def test_a_dataset_is_made_on_s3_as_it_is_on_a_disk(small: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    server_module = pytest.importorskip("moto.server")
    boto3 = pytest.importorskip("boto3")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "test")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        boto3.client("s3").create_bucket(Bucket="corpus")
        local = manifest(small.dataset())
        small.store = "s3://corpus/store"
        code, answer = small.prepare()
        assert (code, ran(answer)) == (0, PHASES)
        uri = answer["manifest"].removesuffix("/manifest.json")
        there = store_for(uri).manifest(uri)
        assert there
        assert there.files == local.files
        assert ran(small.prepare()[1]) == []
    finally:
        server.stop()
