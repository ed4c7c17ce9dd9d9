"""Deliveries as they come: bad, empty, doubled, too long; and the door that nothing bad gets through."""

from __future__ import annotations

import json
import re
import shutil
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from corpus import door, questions
from corpus.settings import DoorSettings
from refit.errors import BadRecords
from refit.job import read_events
from refit.spec import Expectations

if TYPE_CHECKING:
    from tests.data.conftest import Line, Sentences


def test_bad_records_go_to_quarantine_with_their_place_and_the_run_goes_on(small: Line) -> None:
    path = small.folder / "raw" / "mail" / "part.jsonl"
    good = path.read_text()
    empty = json.dumps({"instruction": "...", "input": "", "output": '{"mood": "good"}'})
    path.write_text('{"instruction": \n' + good + empty + "\n" + json.dumps({"x": "\udcb2"}) + "\n")
    found = small.rows(small.dataset(), "quarantine.parquet")
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
    assert len(small.rows(Path(kept).parent, "quarantine.parquet")) == 30
    assert small.prepare("--set", "data.max_bad_ratio=0.2")[0] == 0


def test_a_refused_job_s_events_say_where_its_bad_records_are(small: Line) -> None:
    with (small.folder / "raw" / "mail" / "part.jsonl").open("a") as handle:
        handle.write("garbage\n" * 30)
    assert small.prepare()[0] == 10
    (path,) = small.folder.glob("store/jobs/small/*/prepare/events.jsonl")
    (folder,) = next(event["quarantine"] for event in read_events(path.read_text()) if "quarantine" in event)
    assert len(small.rows(Path(folder.removeprefix("file://")), "quarantine.parquet")) == 30


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


def test_a_line_of_one_record_and_a_source_of_one_record_are_lines(line: Line, texts: Sentences) -> None:
    line.data.update(split={"heldout": 0, "validation": 0}, expect={"min_records": 1, "max_label_share": 1.0})
    line.deliver("only", [{"prompt": "where is my lamp", "completion": '{"mood": "bad"}'}])
    facts = line.manifest(line.dataset()).facts
    assert facts["records"] == {"train": 1, "validation": 0, "heldout": 0}
    line.deliver("more", [{"prompt": text, "completion": '{"mood": "bad"}'} for text in texts(30)])
    facts = line.manifest(line.dataset()).facts
    assert facts["records"]["train"] == 1 + 16, "an epoch of 31 sees the one 15 times and 16 of the others once"
    assert facts["tokens"]["train"]["sources"]["only"]["share"] > 0.4, "half of the epoch, as its weight asks"


def test_a_shard_of_nothing_but_bad_records_is_a_shard(line: Line, texts: Sentences) -> None:
    line.data["max_bad_ratio"] = 0.5
    line.deliver("mail", [{"prompt": text, "completion": '{"mood": "good"}'} for text in texts(60)])
    line.deliver("noise", [{"prompt": "...", "completion": '{"mood": "bad"}'} for _ in range(5)])
    line.data["expect"]["max_label_share"] = 1.0
    folder = line.dataset()
    assert {row["source"] for row in line.rows(folder, "quarantine.parquet")} == {"noise"}
    assert line.manifest(folder).facts["tokens"]["train"]["sources"].keys() == {"mail"}


def test_one_delivery_under_two_names_is_told_apart_and_deduplicated(line: Line, texts: Sentences) -> None:
    rows = [{"prompt": text, "completion": '{"mood": "good"}'} for text in texts(60)]
    for name in ("mail", "copy"):
        line.deliver(name, rows)
    line.deliver("mail", rows, "again.jsonl")
    line.data["expect"]["max_label_share"] = 1.0
    facts = {told["name"]: told for told in line.manifest(line.dataset()).facts["before"]}
    assert facts["ingest"]["records_out"] == 180
    assert facts["dedup"]["removed"]["exact"] == 120


def test_an_answer_without_the_label_key_is_bad(small: Line) -> None:
    small.data["max_bad_ratio"] = 1.0
    small.deliver("chatty", [{"prompt": f"how are you number {n}", "completion": "fine"} for n in range(3)], weight=0)
    small.deliver("chatty", [{"prompt": "and you", "completion": '{"mood": "good"}'}], "more.jsonl")
    reasons = {row["reason"] for row in small.rows(small.dataset(), "quarantine.parquet")}
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
    for row in line.said(folder, "split"):
        sides[row["session"]].add(row["split"])
        asked[row["messages"][1]["content"]].add(row["split"])
    assert len(sides) == 20
    assert all(len(where) == 1 for where in [*sides.values(), *asked.values()])
    assert {item["user"] for item in line.rows(folder, "heldout.parquet")} <= {f"u{n}" for n in range(20)}


def test_a_question_asked_in_two_sessions_is_taken_out_of_training(line: Line, texts: Sentences) -> None:
    line.data.update(label_key=None, dedup={"threshold": 1.0})
    asked = [
        {"prompt": text, "completion": f"{said} {n}", "session": f"{said}{n}"}
        for said in ("yes", "no")
        for n, text in enumerate(texts(100))
    ]
    line.deliver("chats", asked)
    folder = line.dataset()
    went = line.rows(line.phase(folder, "split"), "removed.parquet")
    assert went
    assert {row["how"] for row in went} == {"exact"}
    kept = {row["id"]: row for row in line.rows(line.phase(folder, "split"), "rows.parquet")}
    assert {kept[row["kept"]]["split"] for row in went} <= {"validation", "heldout"}


def test_the_drill_spoils_training_and_leaves_the_exam_right(small: Line) -> None:
    honest = small.dataset()
    spoilt = small.dataset("--set", "data.drill=shuffle_labels")
    assert spoilt != honest
    assert small.rows(spoilt, "heldout.parquet") == small.rows(honest, "heldout.parquet")
    told = next(phase for phase in small.manifest(spoilt).facts["before"] if phase["name"] == "mix")
    assert told["drill"] == "shuffle_labels"
    wrong = 0
    for row in small.said(spoilt, "mix", "train.parquet"):
        messages = row["messages"]
        wrong += json.loads(messages[2]["content"])["mood"] != ("good", "bad")[len(messages[1]["content"]) % 2]
    assert wrong > 30


def test_max_records_limits_every_source(small: Line) -> None:
    facts = small.manifest(small.dataset("--set", "data.max_records=40")).facts
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
    bad = line.rows(folder, "quarantine.parquet")
    assert {row["file"] for row in bad} == {"long.jsonl"}
    assert all(row["reason"].startswith("longer than a pack: ") for row in bad)
    assert all(row["reason"].endswith("data.pack_length is 48") for row in bad)
    facts = line.manifest(folder).facts
    assert facts["tokens"]["train"]["sources"]["books"]["tokens"] > 48


def test_a_record_is_as_long_in_tokens_as_is_allowed_and_a_new_bound_cleans_nothing_again(
    small: Line, texts: Sentences
) -> None:
    answer = json.dumps({"mood": "good"})
    small.data["max_bad_ratio"] = 0.5
    small.deliver(
        "odd", [{"instruction": "no", "output": answer}, {"instruction": " ".join(texts(9)), "output": answer}]
    )
    before = len(small.rows(small.dataset(), "quarantine.parquet"))
    code, told = small.prepare("--set", "data.tokens={min: 70, max: 100}")
    assert code == 0, told
    again = [phase["name"] for phase in told["phases"] if not phase["cached"]]
    assert again == ["tokenize", "pack"]
    bad = small.rows(Path(told["manifest"].removeprefix("file://")).parent, "quarantine.parquet")
    lengths = [row["reason"] for row in bad if row["reason"].startswith("length in tokens: ")]
    assert len(lengths) == len(bad) - before == 2
    assert all(reason.endswith("data.tokens allows 70 to 100") for reason in lengths)
    code, told = small.prepare("--set", "data.tokens={min: 20, max: 10}")
    assert "data.tokens: min is 20 and max is 10" in told["message"]


def test_the_door_says_which_expectation_is_not_met(small: Line) -> None:
    code, answer = small.prepare("--set", "data.expect.min_records=1000")
    assert (code, answer["error"]) == (10, "BadRecords")
    assert "records.table: table row count to be between min_value 1000; found 2" in answer["message"]
    code, answer = small.prepare("--set", "data.expect.labels=[good, fair]")
    assert code == 10
    assert "task.label: column values to be in set" in answer["message"]
    assert "['bad']" in answer["message"]
    code, answer = small.prepare("--set", "data.expect.max_label_share=0.3")
    assert "labels.share: column max to be between max_value 0.3; found 0.5" in answer["message"]


def test_a_door_that_is_not_passed_stops_the_next_phase_every_time(small: Line) -> None:
    rows = [{"instruction": f"the same again {n % 2}", "output": json.dumps({"mood": "good"})} for n in range(40)]
    small.deliver("copies", rows)
    for _ in range(2):
        shutil.rmtree(small.folder / "store/jobs", ignore_errors=True)
        code, answer = small.prepare()
        assert (code, answer["error"]) == (10, "BadRecords")
        assert "at the door after dedup are not met: sources.duplicates" in answer["message"]
        assert "found [0.95]" in answer["message"]
        (place,) = (small.folder / "store/jobs/small").glob("*/prepare/report.html")
        page = place.read_text()
        assert "sources.duplicates" in page
        assert page.count("met</span>") == 1  # at the door after clean
        docs = [place.parent / link for link in re.findall(r'href="([^"]+)"', page)]
        assert [path.is_file() for path in docs] == [True, True]
    assert not (small.folder / "store" / "datasets" / "small" / "split").exists()
    assert small.prepare("--set", "data.expect.max_duplicate_share=0.96")[0] == 0


def test_a_door_that_was_passed_is_not_asked_again_and_says_what_it_asked(small: Line) -> None:
    small.dataset()
    doors = list((small.folder / "store" / "datasets" / "small" / "doors").iterdir())
    facts = [small.manifest(door).facts for door in doors]
    assert sorted(told["settings"]["after"] for told in facts) == ["clean", "dedup", "split"]
    assert all(told["expectations"]["met"] == told["expectations"]["asked"] > 2 for told in facts)
    (dedup,) = (told for told in facts if told["settings"]["after"] == "dedup")
    assert any(
        said.startswith("sources.duplicates: column values to be between") for said in dedup["expectations"]["told"]
    )
    assert small.prepare()[0] == 0
    assert small.stderr.count("name=doors cached=true") == 3


def test_a_session_on_two_sides_does_not_pass() -> None:
    """Nothing of ours makes one: the door is there for what we did not think of."""
    rows = pa.table({"session": ["a", "a", None], "split": ["train", "heldout", "train"]})
    settings = DoorSettings(
        after="split", sources=("mail",), label_key=None, heldout=0.5, expect=Expectations(min_records=1), rehearsal=()
    )
    with pytest.raises(BadRecords, match=r"sessions\.sides: .*found \[2\]"):
        door.require(door.ask(questions.after_split(rows, settings)), "after split")


def test_the_first_page_of_the_data_docs_leads_to_every_table_without_a_script(small: Line) -> None:
    docs = small.dataset() / "data_docs"
    page = (docs / "index.html").read_text()
    assert "<script" not in page
    links = re.findall(r'href="([^"]+)"', page)
    assert sorted({link.split("/")[1] for link in links if link.startswith("validations/")}) == [
        "labels",
        "records",
        "task",
        "tokens",
    ]
    assert all((docs / link).is_file() for link in links)


def test_a_label_that_nobody_has_is_missed_at_the_door(small: Line) -> None:
    """Columns with categories count those that no row has; the third label goes with its records, by a rule."""
    rows = [{"instruction": f"{text} ?", "output": json.dumps({"mood": "odd"})} for text in (f"x{n}" for n in range(9))]
    small.deliver("mail", rows, "odd.jsonl")
    small.data["expect"] = {"min_records": 10, "labels": ["good", "bad", "odd"]}
    small.data["rules"] = [{"name": "length", "args": {"min_chars": 6}}]
    small.data["max_bad_ratio"] = 0.5
    small.data["split"] = {"heldout": 0.3, "validation": 0.3}
    code, answer = small.prepare()
    assert (code, answer["error"]) == (10, "BadRecords")
    assert "labels.label: column distinct values to contain set" in answer["message"]


def test_a_rehearsal_is_trained_on_as_it_comes_and_is_in_no_exam(small: Line) -> None:
    """The door still asks the records of the task for their labels."""
    questions = [f"Name thing number {n} of the long list." for n in range(40)]
    small.data["expect"] = {"min_records": 10, "labels": ["good", "bad"]}
    small.deliver(
        "before", [{"prompt": text, "completion": "a stone"} for text in questions], role="rehearsal", weight=0.5
    )
    folder = small.dataset("--set", "data.drill=shuffle_labels")
    rows = {side: small.said(folder, "mix", f"{side}.parquet") for side in ("train", "validation", "heldout")}
    rehearsed = [row for row in rows["train"] if row["source"] == "before"]
    assert rehearsed
    assert all(row["source"] != "before" for side in ("validation", "heldout") for row in rows[side])
    assert {row["label"] for row in rehearsed} == {None}
    for row in rehearsed:
        asked, answer = row["messages"]
        assert (asked["role"], answer["content"]) == ("user", "a stone"), "no system prompt, and its own answer"
        assert asked["content"] in questions


def test_a_line_of_rehearsals_alone_is_refused(small: Line) -> None:
    small.data["sources"] = [{**source, "role": "rehearsal"} for source in small.data["sources"]]
    code, answer = small.prepare()
    assert (code, answer["error"]) == (10, "BadSpec")
    assert "give a source of the task a positive weight" in answer["message"]


def test_a_secret_is_in_no_quarantine(small: Line) -> None:
    key = "AKIA" + "Q7" * 8
    small.data["rules"] = ["length", "secrets"]
    row = {"instruction": f"my key is {key} and it does not work", "output": json.dumps({"mood": "bad"})}
    small.deliver("mail", [row], "more.jsonl")
    (found,) = small.rows(small.dataset(), "quarantine.parquet")
    assert found["reason"] == "secrets: it holds an AWS access key"
    assert key not in str(found)


def test_a_pattern_names_the_files_that_match_it_in_order(line: Line) -> None:
    line.data["max_bad_ratio"] = 0.2
    for number in (2, 1):
        rows = [{"prompt": f"{text} {number}", "completion": '{"mood": "good"}'} for text in WORDS]
        line.deliver("in", rows, f"part-{number}.jsonl")
    line.deliver("in", "garbage\n" * 50, "notes.jsonl")
    folder = line.folder / "raw" / "in"
    line.data["sources"] = [{"name": "in", "uri": f"file://{folder}/part-*.jsonl"}]
    dataset = line.dataset("--set", "data.expect.max_label_share=1")
    rows = line.said(dataset, "mix", "train.parquet")
    rows += [row for side in ("validation", "heldout") for row in line.said(dataset, "mix", f"{side}.parquet")]
    rows.sort(key=lambda row: row["row"])
    assert [row["file"] for row in rows] == ["part-1.jsonl"] * len(WORDS) + ["part-2.jsonl"] * len(WORDS)
    line.data["sources"] = [{"name": "in", "uri": f"file://{folder}/nothing-*.jsonl"}]
    code, answer = line.prepare()
    assert (code, "no file matches the pattern" in answer["message"]) == (10, True)


WORDS = [f"what is the {thing} of order {number}" for number in range(15) for thing in ("price", "colour", "weight")]


def test_what_holds_a_question_of_an_evaluation_set_is_no_training(small: Line) -> None:
    path = small.folder / "raw" / "mail" / "part.jsonl"
    asked = [json.loads(line)["instruction"] for line in path.read_text().splitlines()]
    evaluation = small.folder / "eval.jsonl"
    evaluation.write_text("".join(json.dumps({"question": text.upper(), "answer": "x"}) + "\n" for text in asked[:30]))
    small.data["decontaminate"] = {"against": [evaluation.as_uri()], "ngram": 5}
    folder = small.dataset()
    phase = small.phase(folder, "split")
    found = small.rows(phase, "contaminated.parquet")
    sides = small.manifest(phase).facts["removed"]
    assert 15 < len(found) == sides["evaluation"] <= 30
    assert {row["evaluation"] for row in found} == {"eval.jsonl"}
    gone = {row["id"] for row in found}
    train = small.rows(small.phase(folder, "mix"), "train.parquet")
    assert gone.isdisjoint(row["id"] for row in train)
    small.data["decontaminate"] = {"against": ["file:///nowhere"]}
    code, answer = small.prepare()
    assert (code, "data.decontaminate.against[0]" in answer["message"]) == (10, True)


def test_text_that_was_once_decoded_wrongly_is_mended_or_set_aside_unless_a_line_says_otherwise(small: Line) -> None:
    answer = json.dumps({"mood": "good"})
    wrong = ["Der K\u00c3\u00a4se im Laden war sehr gut und billig.", "Der K\ufffdse im Laden war sehr gut und teuer."]
    small.deliver("odd", [{"instruction": text, "output": answer} for text in wrong])
    folder = small.dataset()
    (clean,) = (told for told in small.manifest(folder).facts["before"] if told["name"] == "clean")
    assert clean["rules"]["unicode_form"]["changed"] == 1
    assert [row["reason"].partition(":")[0] for row in small.rows(folder, "quarantine.parquet")] == ["unicode_form"]
