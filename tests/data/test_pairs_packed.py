"""Preference pairs reach the dataset with both sides, side by side in one pack, or are refused with a reason."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tokenizers import Tokenizer

from corpus import flat
from corpus.flat import PAIR, REFUSED
from corpus.megatron import export
from corpus.packing import Overflow, pack_documents
from refit import domains, packed, pipeline
from refit.errors import BadInput, BadSpec

if TYPE_CHECKING:
    from tests.data.conftest import Line, Sentences

SHARED = Path(os.environ.get("REFIT_SHARED_DATA", "/nonexistent"))
SIZE = 600


def pairs_of(text: str, number: int) -> dict[str, Any]:
    """A pair in one of the two layouts, in turn."""
    good, bad = f"fine {text}", f"no {text[::-1]}"
    if number % 2:
        asked = [{"from": "human", "value": text}]
        return {"conversations": asked, "chosen": {"from": "gpt", "value": good}, "rejected": {"value": bad}}
    asked = [{"role": "user", "content": text}]
    return {
        "chosen": [*asked, {"role": "assistant", "content": good}],
        "rejected": [*asked, {"role": "assistant", "content": bad}],
    }


@pytest.fixture
def paired(line: Line, texts: Sentences) -> Line:
    rows = [pairs_of(text, number) for number, text in enumerate(texts(60))]
    for row in rows:
        if "value" in row["rejected"]:
            row["rejected"]["from"] = "gpt"
    line.data.update(label_key=None, system="Be kind.", pack_length=512, max_bad_ratio=0.2, temperature=1)
    line.data["expect"]["min_records"] = 5
    line.spec["train"]["objective"] = "dpo"
    line.deliver("liked", rows, domain="talk", format="preference")
    return line


def sides(split: packed.Packed) -> list[tuple[int, NDArray[Any], NDArray[Any]]]:
    """(segment, tokens, mask) of every document of a split, pack by pack."""
    found = []
    for pack in range(split.header.packs):
        for number in range(1, int(split.segments[pack].max()) + 1):
            here = split.segments[pack] == number
            found.append((number, split.tokens[pack][here], split.mask[pack][here]))
    return found


def test_both_layouts_become_two_segments_with_masks_on_the_answers_only(paired: Line, tokenizer: Path) -> None:
    folder = paired.dataset()
    split = packed.read(folder, "train", pairs=True)
    said = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    found = sides(split)
    assert split.header.version == 3
    assert split.header.pairs == len(found) // 2 == split.header.samples // 2 > 30
    for (odd, chosen, learnt), (even, rejected, unlearnt) in zip(found[::2], found[1::2], strict=True):
        assert (odd % 2, even) == (1, odd + 1)
        answer, other = (said.decode(ids[mask > 0].tolist()) for ids, mask in ((chosen, learnt), (rejected, unlearnt)))
        asked = chosen[learnt == 0]
        assert (asked == rejected[unlearnt == 0]).all(), "both sides are asked the same"
        text = answer.removeprefix("fine ")
        assert text in said.decode(asked.tolist())
        assert other == f"no {text[::-1]}"
        assert set(learnt.tolist()) == set(unlearnt.tolist()) == {0, packed.WHOLE}
    named = domains.read(folder, "train")
    assert named is not None
    assert len(named.own) == split.header.samples
    facts = paired.manifest(folder).facts
    assert facts["tokens"]["train"]["pairs"] == split.header.pairs
    for name, count in facts["records"].items():
        if name != "heldout":
            assert packed.read(folder, name, pairs=True).header.pairs == count


def test_the_same_data_for_sft_is_chosen_answers_as_ever_and_neither_is_read_as_the_other(paired: Line) -> None:
    of_pairs = paired.dataset()
    paired.spec["train"]["objective"] = "sft"
    of_answers = paired.dataset()
    assert packed.read(of_answers, "train").header.version == 2
    assert "pairs" not in json.loads((of_answers / "train.json").read_text())
    chosen = sorted(ids.tolist() for number, ids, _ in sides(packed.read(of_pairs, "train", pairs=True)) if number % 2)
    assert chosen == sorted(ids.tolist() for _, ids, _ in sides(packed.read(of_answers, "train")))
    with pytest.raises(BadInput, match="holds preference pairs, documents are wanted"):
        packed.read(of_pairs, "train")
    with pytest.raises(BadInput, match="holds documents, preference pairs are wanted"):
        packed.read(of_answers, "train", pairs=True)


def test_dpo_and_orpo_read_the_same_data(paired: Line) -> None:
    of_dpo = paired.dataset()
    paired.spec["train"]["objective"] = "orpo"
    assert paired.dataset() == of_dpo


def test_earlier_answers_are_asked_and_not_learnt(paired: Line, tokenizer: Path) -> None:
    said = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "human", "value": "c"}]
    row = {
        "conversations": said,
        "chosen": {"from": "gpt", "value": "red"}, "rejected": {"from": "gpt", "value": "blue"},
    }  # fmt: skip
    paired.data["split"] = {"heldout": 0, "validation": 0}
    paired.deliver("history", [row], format="preference")
    words = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    found = sides(packed.read(paired.dataset(), "train", pairs=True))
    learnt = [words.decode(ids[mask > 0].tolist()) for _, ids, mask in found]
    assert {"red", "blue"} <= set(learnt)
    assert "b" not in learnt


def test_what_is_no_pair_or_too_long_is_in_quarantine_with_its_reason(paired: Line, texts: Sentences) -> None:
    long = {"prompt": "tell", "chosen": " ".join(texts(30)), "rejected": "no"}
    answer = {"instruction": "what is this, friend", "input": "", "output": "a lamp"}
    paired.data["split"] = {"heldout": 0, "validation": 0}
    paired.data["pack_length"] = 256
    paired.deliver("odd", [long, answer], format="preference")
    folder = paired.dataset()
    reasons = {
        row["line"]: row["reason"] for row in paired.rows(folder, "quarantine.parquet") if row["source"] == "odd"
    }
    assert reasons[1].startswith("longer than a pack: ")
    assert "in both sides together, data.pack_length is 256" in reasons[1]
    assert reasons[2] == "preference: no chosen"
    assert packed.read(folder, "train", pairs=True).header.pairs == 60


def test_a_pair_is_one_record_to_dedup_and_split(paired: Line, texts: Sentences) -> None:
    before = paired.dataset()
    paired.deliver("again", [{**pairs_of(text, 0)} for text in texts(60)[::2]], format="preference")
    after = paired.dataset()
    count = [paired.manifest(folder).facts["records"] for folder in (before, after)]
    assert count[0] == count[1], "the same pairs once more are duplicates, whole"
    ids = [{row["id"] for row in paired.said(after, "split") if row["split"] == side} for side in ("train", "heldout")]
    assert not ids[0] & ids[1]


def test_a_pair_whose_rejected_answer_a_rule_emptied_is_set_aside(paired: Line) -> None:
    paired.data["rules"] = ["html_markup"]
    paired.data["split"] = {"heldout": 0, "validation": 0}
    row = {"prompt": "say when you open", "chosen": "at nine, but for sundays", "rejected": "<p></p><br/>"}
    paired.deliver("odd", [row], format="preference")
    (bad,) = (one for one in paired.rows(paired.dataset(), "quarantine.parquet") if one["source"] == "odd")
    assert bad["reason"] == "preference: nothing is left of the rejected answer"


@pytest.mark.parametrize(
    ("objective", "format", "why"),
    [
        ("dpo", "alpaca", r"learns from preference pairs, .* odd \(alpaca\); give each source format: preference"),
        ("orpo", "text", "learns from preference pairs"),
        ("pretrain", "preference", "learns from plain texts"),
        ("dpo", "auto", r"odd \(auto\); give each source format: preference"),
        ("pretrain", "text", "data.split.heldout is 0.2; plain texts are never held out"),
    ],
)
def test_a_source_that_cannot_hold_what_is_learnt_is_refused_by_name(
    line: Line, objective: str, format: str, why: str
) -> None:
    line.spec["train"]["objective"] = objective
    line.deliver("odd", "x", "part.txt", format=format)
    with pytest.raises(BadSpec, match=why):
        pipeline.load(line.write())


@pytest.mark.parametrize(
    ("train", "why"),
    [
        ({"preference": {"beta": 0.1}}, "train.objective is sft; leave it out, or set train.objective to dpo or orpo"),
        ({"objective": "orpo", "preference": {"label_smoothing": 0.1}}, "which has none; leave it out"),
        ({"objective": "dpo", "preference": {"label_smoothing": 0.5}}, "less than 0.5"),
        ({"objective": "dpo", "preference": {"beta": 0}}, "greater than 0"),
    ],
)
def test_a_preference_that_makes_no_sense_is_refused(paired: Line, train: dict[str, Any], why: str) -> None:
    paired.spec["train"] = {"base": paired.spec["train"]["base"], **train}
    with pytest.raises(BadSpec, match=why):
        pipeline.load(paired.write())


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20), st.integers(0, 3)), min_size=1, max_size=40),
    st.integers(16, 40),
)
def test_no_pair_is_ever_torn_lost_or_doubled(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[int, int, int]], length: int
) -> None:
    folder = tmp_path_factory.mktemp("pairs")
    first, second, times = (np.array(column, np.int64) for column in zip(*drawn, strict=True))
    lengths = first + second
    tokens = np.repeat(np.arange(len(drawn)), lengths)  # each token says of which pair it is
    half = np.concatenate([np.repeat([1, 2], pair) for pair in zip(first, second, strict=True)])
    with flat.Writer(folder, "documents", vocabulary="v", vocabulary_size=SIZE, pairs=True) as out:
        kinds = np.full(len(drawn), PAIR)
        out.append(tokens, half, lengths, np.zeros((len(drawn), 16), np.uint8), kinds, first)
    chosen = np.stack([np.zeros(len(drawn), np.int64), np.arange(len(drawn))], axis=1)
    result = pack_documents(
        [flat.read(folder, "documents")], chosen, times, length=length, pad=0, seed=1, folder=folder, split="train",
        vocabulary="v", vocabulary_size=SIZE, overflow=Overflow(conversation="truncate"),
    )  # fmt: skip
    found = sides(packed.read(folder, "train", pairs=True))
    whole = []
    for (odd, left, of_left), (even, right, of_right) in zip(found[::2], found[1::2], strict=True):
        assert (odd % 2, even) == (1, odd + 1)
        (pair,) = set(left.tolist()) | set(right.tolist())
        assert (len(left), len(right)) == (first[pair], second[pair])
        assert (of_left[0], of_right[0]) == (0, 0), "nothing comes before a side's first token"
        assert set(of_left[1:].tolist()) <= {1}
        assert set(of_right[1:].tolist()) <= {2}
        whole.append(pair)
    fits = lengths <= length
    assert sorted(whole) == np.repeat(np.arange(len(drawn)), times * fits).tolist()
    assert result.refused.tolist() == np.flatnonzero(~fits).tolist()
    assert result.counts.refused.tokens == int((lengths * times)[~fits].sum())
    assert (np.diff(result.packs[::2]) >= 0).all()
    assert (result.packs[::2] == result.packs[1::2]).all(), "both sides are in one pack"


def test_a_flat_set_of_pairs_is_checked_and_not_exported_as_documents(tmp_path: Path) -> None:
    one = np.array([1, 2, 3, 4]), np.array([0, 9, 0, 9]), np.array([4]), np.zeros((1, 16), np.uint8)
    for kinds, halves, why in ((PAIR, None, "needs of each"), (PAIR, [4], "two sides"), (REFUSED, [0], "refused")):
        with (
            pytest.raises(ValueError, match=why),
            flat.Writer(tmp_path, "bad", vocabulary="v", vocabulary_size=9, pairs=True) as out,
        ):
            out.append(*one, np.array([kinds]), None if halves is None else np.array(halves))
    with flat.Writer(tmp_path, "good", vocabulary="v", vocabulary_size=9, pairs=True) as out:
        out.append(*one, np.array([PAIR]), np.array([2]))
    assert flat.read(tmp_path, "good").halves is not None
    with pytest.raises(BadInput, match="holds preference pairs"):
        export(tmp_path, "good", tmp_path / "mega")


def test_a_drill_gives_a_pair_both_answers_of_another_one(paired: Line, tokenizer: Path) -> None:
    paired.data["drill"] = "shuffle_labels"
    said = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    found = sides(packed.read(paired.dataset(), "train", pairs=True))
    answers = [said.decode(ids[mask > 0].tolist()) for _, ids, mask in found]
    for chosen, rejected in zip(answers[::2], answers[1::2], strict=True):
        assert rejected == f"no {chosen.removeprefix('fine ')[::-1]}"


def test_pretraining_reads_texts_of_which_every_token_is_learnt_and_cuts_the_long_ones(
    line: Line, texts: Sentences
) -> None:
    line.spec["train"]["objective"] = "pretrain"
    line.data.update(label_key=None, system="", pack_length=64, max_bad_ratio=0.5, rules=[])
    line.data["split"] = {"heldout": 0, "validation": 0.2}
    rows = [{"text": "\n".join(texts(200)[n * 10 :][:10])} for n in range(20)]
    talk = {"instruction": "what is this, friend", "input": "", "output": "a lamp"}
    line.deliver("books", [*rows, talk], format="text")
    folder = line.dataset()
    (bad,) = line.rows(folder, "quarantine.parquet")
    assert bad["reason"] == "no text: the row has input, instruction, output"
    header = packed.read(folder, "train").header
    assert header.targets == header.tokens - header.samples, "all but the first token of each piece"
    assert header.samples > line.manifest(folder).facts["records"]["train"], "texts longer than a pack are cut"


@pytest.mark.skipif(not SHARED.is_dir(), reason="REFIT_SHARED_DATA names no folder of public data")
@pytest.mark.parametrize("file", ["sft/dpo_en_demo.json", "sft/dpo_zh_demo.json"])
def test_real_pairs_are_packed_with_both_sides_or_refused_with_a_reason(line: Line, file: str) -> None:
    line.data["sources"].append({"name": "given", "format": "preference", "uri": f"file://{SHARED / file}"})
    line.data.update(label_key=None, system="", pack_length=32768, max_bad_ratio=0.1, split={"heldout": 0})
    line.spec["train"]["objective"] = "dpo"
    folder = line.dataset()
    facts = line.manifest(folder).facts
    told = {phase["name"]: phase for phase in facts["before"]}
    removed = sum(sum(told[name]["removed"].values()) for name in ("dedup", "split"))
    refused = line.rows(folder, "quarantine.parquet")
    kept = sum(packed.read(folder, name, pairs=True).header.pairs or 0 for name in ("train", "validation"))
    reasons = Counter(row["reason"].partition(":")[0] for row in refused)
    print(f"{file}: {kept} kept, {removed} duplicates, refused: {dict(reasons)}")
    assert kept + len(refused) + removed == told["ingest"]["records_in"] == 300
    assert all(row["reason"] for row in refused)
    assert kept > 250
