"""Scores: what a fitted model tells good from bad by, what follows from a score, and the command that fits."""

from __future__ import annotations

import json
import math
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from corpus import fit, score, sources
from corpus.diff import diff
from corpus.ngrams import VOCABULARY
from corpus.quality import BUCKETS, Linear
from corpus.record import Message
from corpus.score import Model, Scores, Verdict
from corpus.shingles import Texts
from refit import packed
from refit.errors import BadInput
from refit.spec import Pipeline, Score
from tests.data.conftest import Line, Sentences

SHARED = Path(os.environ.get("REFIT_SHARED_DATA", "/nonexistent"))
MODEL = "file:///models/score"


def plain_perplexity(given: list[list[str]], text: list[str]) -> float:
    """As `Ngrams.perplexity`, on words as strings, by the book."""
    seen = [
        Counter(tuple(words[at - n + 1 : at + 1]) for words in given for at in range(n - 1, len(words)))
        for n in (1, 2, 3)
    ]
    bits = 0.0
    for at, word in enumerate(text):
        total, different = sum(seen[0].values()), len(seen[0])
        likely = (seen[0][word,] + different / VOCABULARY) / (total + different)
        for n in range(2, min(3, at + 1) + 1):
            context = tuple(text[at - n + 1 : at])
            after = {gram: often for gram, often in seen[n - 1].items() if gram[:-1] == context}
            if after:
                often = seen[n - 1][*context, word]
                likely = (often + len(after) * likely) / (sum(after.values()) + len(after))
        bits += math.log(likely)
    return math.exp(-bits / len(text))


words = st.lists(st.sampled_from(["red", "blue", "lamp", "chair", "late"]), min_size=1, max_size=12)


@settings(deadline=None)  # the first call compiles
@given(st.lists(words, min_size=1, max_size=6), words, st.booleans())
def test_perplexity_is_that_of_its_plain_twin(given: list[list[str]], text: list[str], new: bool) -> None:
    text = [*text, "never"] if new else text
    model = fit.count(Texts.of([" ".join(one) for one in given]))
    found, number = model.perplexity(Texts.of([" ".join(text)]))
    assert number.tolist() == [len(text)]
    assert found[0] == pytest.approx(plain_perplexity(given, text))


def test_what_may_come_after_a_word_sums_to_one() -> None:
    model = fit.count(Texts.of(["red lamp", "red chair", "blue lamp late"]))
    words = ["red", "lamp", "chair", "blue", "late", "never"]
    one, two = (model.perplexity(Texts.of(texts))[0] for texts in (["red"], [f"red {word}" for word in words]))
    *known, unknown = one[0] / two**2
    assert sum(known) + (VOCABULARY - len(known)) * unknown == pytest.approx(1)
    assert known[1] > known[4] > unknown, "seen after red, seen, never seen"


def test_chinese_is_judged_by_its_characters() -> None:
    model = fit.count(Texts.of(["今天天气很好", "天气很好我们去公园"]))
    found, number = model.perplexity(Texts.of(["天气很好", "好很气天"]))
    assert number.tolist() == [4, 4]
    assert found[0] < found[1] / 2


def test_only_the_commonest_are_kept_where_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "MAX_GRAMS", 3)
    model = fit.count(Texts.of(["red lamp red lamp red lamp blue chair late desk"]))
    assert len(model.keys) == 2 + 2 + 2, "red, lamp; red lamp, lamp red; and their trigrams"
    assert np.isfinite(model.perplexity(Texts.of(["red lamp desk"]))[0][0])


@pytest.fixture(scope="module")
def model() -> Model:
    rng = random.Random(1)
    good = [f"the {rng.choice(['red', 'blue'])} lamp came in time and I am happy {n}" for n in range(40)]
    bad = [f"buy now click here win prize {rng.choice(['now', 'here'])} {n}" for n in range(40)]
    return Model(fit.count(Texts.of(good)), fit.separate(good, bad, 1))


def test_good_and_bad_are_told_apart(model: Model) -> None:
    scores = score.score(model, ["the blue lamp came in time", "click here now and win", ""])
    assert scores.quality[0] > 0.8 > 0.2 > scores.quality[1]
    assert scores.perplexity[0] < scores.perplexity[1] / 10
    assert scores.words.tolist() == [6, 5, 0]
    assert np.isnan(scores.quality[2])
    assert np.isnan(scores.perplexity[2])


@settings(deadline=None)
@given(texts=st.lists(st.text(max_size=80), max_size=8))
def test_any_text_has_a_score_that_does_not_depend_on_its_neighbours(model: Model, texts: list[str]) -> None:
    together = score.score(model, texts)
    judged = together.words > 0
    assert (together.perplexity[judged] > 0).all()
    assert ((together.quality[judged] >= 0) & (together.quality[judged] <= 1)).all()
    for at, text in enumerate(texts):
        alone = score.score(model, [text])
        assert np.array_equal(alone.quality, together.quality[at : at + 1], equal_nan=True)
        assert np.array_equal(alone.perplexity, together.perplexity[at : at + 1], equal_nan=True)


SCORES = Scores(
    np.array([90.0, 900.0, math.nan, 900.0]), np.array([0.9, 0.04, math.nan, 0.04]), np.array([50, 50, 0, 5])
)


def test_nothing_follows_from_a_score_where_a_line_asks_for_nothing() -> None:
    assert score.judge(SCORES, Score(model=MODEL)) == [Verdict(None, 1.0)] * 4


def test_a_score_drops_or_weighs_and_short_texts_are_not_judged() -> None:
    stays = Verdict(None, 1.0)
    low = score.judge(SCORES, Score(model=MODEL, drop_below_quality=0.3))
    assert low == [stays, Verdict("score: quality 0.040 is below 0.3", 1.0), stays, stays]
    strange = score.judge(SCORES, Score(model=MODEL, drop_above_perplexity=500))
    assert strange == [stays, Verdict("score: perplexity 900 is above 500", 1.0), stays, stays]
    weighed = score.judge(SCORES, Score(model=MODEL, weight="quality", weight_floor=0.1))
    assert weighed == [Verdict(None, 0.9), Verdict(None, 0.1), stays, stays]


def test_a_weight_scales_what_is_learnt_and_is_never_scaled_to_nothing() -> None:
    given = [("user", None), ("assistant", 0), ("user", 1), ("assistant", 0.002), ("user", None), ("assistant", None)]
    messages = [
        {"role": role, "content": "x"} | ({} if weight is None else {"weight": weight}) for role, weight in given
    ]
    score.weigh(messages, 1.0)
    assert [message.get("weight") for message in messages] == [weight for _, weight in given]
    score.weigh(messages, 0.1234)
    assert [message.get("weight") for message in messages] == [None, 0, 1, 0.001, None, 0.123]
    text: list[Message] = [{"role": "text", "content": "x"}]
    score.weigh(text, 0.5)
    assert text == [{"role": "text", "content": "x", "weight": 0.5}]


def test_a_line_that_asks_for_a_score_names_a_model() -> None:
    assert Score(model=MODEL, weight="quality").limits == Score(model="s3://elsewhere/score", weight="quality").limits
    for asked in ({"drop_below_quality": 0.2}, {"drop_above_perplexity": 900}, {"weight": "quality"}):
        with pytest.raises(ValidationError, match="names no model; make one with `corpus fit`"):
            Score.model_validate(asked)


def test_what_is_scored_of_a_record_is_what_was_said() -> None:
    turns = [("system", "Be kind."), ("user", "Where is my lamp?"), ("assistant", "On its way.")]
    assert score.text_of([{"role": role, "content": said} for role, said in turns]) == "Where is my lamp?\nOn its way."


def test_a_model_comes_back_as_it_was(model: Model, tmp_path: Path) -> None:
    score.save(model, tmp_path)
    again = score.load(tmp_path)
    for one, other in zip(score.score(model, ["a lamp"]), score.score(again, ["a lamp"]), strict=True):
        assert np.array_equal(one, other)


def _spoilt(folder: Path) -> Iterator[str]:
    rows = np.zeros(3, np.uint32)
    keys = np.zeros(3, np.uint64)
    for broken in (
        {"keys": keys, "counts": rows, "totals": rows, "distinct": rows[:1], "start": np.zeros(2, np.int64)},
        {"keys": np.array([{}, {}], object), "counts": rows, "totals": rows, "distinct": rows, "start": keys},
        {"keys": keys},
    ):
        np.savez(folder / score.PERPLEXITY, allow_pickle=True, **broken)
        yield score.PERPLEXITY
    (folder / score.PERPLEXITY).write_bytes(b"PK\x03\x04 not a zip")
    yield score.PERPLEXITY


def test_a_damaged_model_and_a_pickle_are_refused(model: Model, tmp_path: Path) -> None:
    score.save(model, tmp_path)
    for name in _spoilt(tmp_path):
        with pytest.raises(BadInput, match=f"{name}.*Fit it anew"):
            score.load(tmp_path)
    score.save(Model(model.ngrams, Linear(np.zeros(BUCKETS - 1, np.float32), 0.0)), tmp_path)
    with pytest.raises(BadInput, match="weights and a bias"):
        score.load(tmp_path)


def _deliver(line: Line, texts: Sentences) -> tuple[Path, Path]:
    good = line.deliver("good", [{"text": text} for text in texts(200)])
    return good, line.deliver("bad", "".join(f"win {n} now click {n} here\n" for n in range(200)), "part.txt")


def test_fit_gives_a_model_that_a_line_can_name(line: Line, texts: Sentences) -> None:
    good, bad = _deliver(line, texts)
    uri = f"{line.store}/scores/first"
    code, told = line.corpus("fit", "--good", str(good), "--bad", str(bad), "--output", uri)
    assert code == 0, told
    assert told["texts"] == {"good": 200, "bad": 200}
    assert told["held_back"] == {"good": 20, "bad": 20}
    assert told["accuracy"] == told["auc"] == told["perplexity"]["auc"] == 1.0
    assert told["perplexity"]["good"] < told["perplexity"]["bad"]
    line.data["score"] = {"model": uri, "weight": "quality"}
    found = sources.score_model(Pipeline.model_validate(line.spec))["score"]
    assert score.score(score.load(found.fetch()), ["red lamp blue chair"]).quality[0] > 0.8


def test_the_same_samples_give_the_same_model_in_any_order(line: Line, texts: Sentences) -> None:
    good, bad = _deliver(line, texts)
    turned = line.deliver("turned", [{"text": text} for text in reversed(texts(200))])
    digests = []
    for name, file in (("one", good), ("two", turned)):
        folder = line.folder / name
        code, told = line.corpus("fit", "--good", str(file), "--bad", str(bad), "--output", str(folder))
        assert code == 0, told
        digests.append((told["fingerprint"], line.manifest(folder).content_digest()))
    assert digests[0] == digests[1]


def test_fit_says_what_it_lacks(line: Line, texts: Sentences) -> None:
    good, bad = _deliver(line, texts)
    dumb = line.deliver("dumb", [{"text": "?" * n} for n in range(1, 40)])
    few = line.deliver("few", [{"text": text} for text in texts(19)])
    output = str(line.folder / "model")
    for sides, why in (
        ((good, good), "--good: 0 different texts that are not on the other side too; at least 20 are needed"),
        ((few, bad), "--good: 19 different texts"),
        ((dumb, bad), "--good: its texts hold no words"),
        ((good, dumb), "have no words on one side"),
        ((line.folder / "none.jsonl", bad), "none.jsonl: there is no such file"),
    ):
        code, told = line.corpus("fit", "--good", str(sides[0]), "--bad", str(sides[1]), "--output", output)
        assert code == 10
        assert why in told["message"]
    assert line.corpus("fit", "--good", str(good), "--bad", str(bad), "--output", output)[0] == 0
    code, told = line.corpus("fit", "--good", str(bad), "--bad", str(good), "--output", output)
    assert code == 10
    assert "it holds a score already" in told["message"]


def test_a_model_that_is_not_there_is_named_by_its_field(line: Line) -> None:
    line.data["score"] = {"model": f"{line.store}/none"}
    line.deliver("mail", "x")
    with pytest.raises(BadInput, match=r"data.score.model is .*no manifest.json there.*`corpus fit` makes one"):
        sources.score_model(Pipeline.model_validate(line.spec))


@pytest.mark.skipif(not SHARED.is_dir(), reason="REFIT_SHARED_DATA names no folder of public data")
def test_real_answers_are_told_from_the_same_words_in_any_order(tmp_path: Path) -> None:
    """English by words, Chinese by characters, in one model."""
    rng = random.Random(1)
    files = {side: tmp_path / f"{side}.jsonl" for side in ("good", "bad")}
    for language, blank in (("en", " "), ("zh", "")):
        rows = json.loads((SHARED / f"sft/alpaca_{language}_demo.json").read_text(encoding="utf-8"))
        for row in rows:
            said = row["output"].split() if blank else list(row["output"])
            mixed = blank.join(rng.sample(said, len(said)))
            for side, text in (("good", row["output"]), ("bad", mixed)):
                with files[side].open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    told = fit.fit([files["good"]], [files["bad"]], (tmp_path / "model").as_uri(), max_texts=10_000, seed=1)
    assert told["auc"] > 0.9
    assert told["perplexity"]["auc"] > 0.8
    assert told["perplexity"]["good"] < told["perplexity"]["bad"] / 2


def test_a_line_drops_by_its_model_and_of_duplicates_keeps_the_better(line: Line, texts: Sentences) -> None:
    good, bad = _deliver(line, texts)
    uri = f"{line.store}/scores/first"
    assert line.corpus("fit", "--good", str(good), "--bad", str(bad), "--output", uri)[0] == 0
    noise = bad.read_text().splitlines()[:40]
    line.data["sources"] = []
    line.data.update(label_key=None, system="", max_bad_ratio=0.9, dedup={"threshold": 0.5})
    line.deliver("mail", [{"text": text} for text in texts(120)])
    line.deliver("mail", "\n".join(noise) + "\n", "noise.txt")
    # Two that are near to each other, the younger one without the words that the bad samples have.
    words = " ".join(texts(8)[4:])
    worse = f"{words} {noise[0]}"
    line.deliver("near", [{"text": worse, "time": "2026-01-01"}, {"text": words, "time": "2026-02-01"}])
    line.data["split"] = {"heldout": 0, "validation": 0.1}
    line.data["score"] = {"model": uri, "drop_below_quality": 0.3, "min_words": 5}
    folder = line.dataset()
    dropped = line.rows(folder, "quarantine.parquet")
    assert len(dropped) == 40
    assert {row["file"] for row in dropped} == {"noise.txt"}
    assert all(row["reason"].startswith("score: quality 0.") for row in dropped)
    told = {phase["name"]: phase for phase in line.manifest(folder).facts["before"]}
    assert told["clean"]["scored"] == {"kept": 122, "dropped": 40}
    (went,) = [row for row in line.rows(line.phase(folder, "dedup"), "removed.parquet") if row["source"] == "near"]
    assert went["line"] == 1, "the older one, but the worse"


def _talk(text: str, number: int) -> list[dict[str, object]]:
    """Two answers, of which the first counts half; none of it before every third."""
    first = {"role": "assistant", "content": "which one", "weight": 0.5 if number % 3 else 0}
    last = {"role": "assistant", "content": f"the lamp {number}"}
    return [{"role": "user", "content": text}, first, {"role": "user", "content": "this"}, last]


def test_a_line_weighs_by_its_model_and_the_weights_reach_the_mask_and_nothing_else(
    line: Line, texts: Sentences
) -> None:
    good, bad = _deliver(line, texts)
    uri = f"{line.store}/scores/first"
    assert line.corpus("fit", "--good", str(good), "--bad", str(bad), "--output", uri)[0] == 0
    noise = bad.read_text().splitlines()
    line.data["sources"] = []
    line.data.update(label_key=None, dedup={"threshold": 1.0})
    mixed = [f"{text} {' '.join(noise[: n % 5])}" for n, text in enumerate(texts(120))]
    line.deliver("mail", [{"messages": _talk(text, n)} for n, text in enumerate(mixed)])
    line.data["score"] = {"model": uri, "min_words": 14}
    before = line.dataset()
    line.data["score"].update(weight="quality", weight_floor=0.2)
    after = line.dataset()

    # The last answers have the record's weight, the first ones half of it, or none.
    rows, own = line.said(after, "mix", "train.parquet"), Counter[tuple[int, ...]]()
    for row in rows:
        judged = len(score.text_of(row["messages"]).split()) >= 14
        weight = max(0.2, row["quality"]) if judged else 1.0
        first, last = (message.get("weight", 1) for message in row["messages"] if message["role"] == "assistant")
        assert (first, last) == (0 if first == 0 else round(0.5 * weight, 3), round(weight, 3))
        own[tuple(sorted({round(255 * one) for one in (first, last) if one}))] += 1
    assert len(own) > 10
    train = packed.read(after, "train")
    found = Counter(
        tuple(np.unique(mask[(segments == number) & (mask > 0)]).tolist())
        for mask, segments in zip(train.mask, train.segments, strict=True)
        for number in range(1, segments.max() + 1)
    )
    assert found == own

    # Who stays and where, which tokens they are, and the exam are as they were.
    assert (train.tokens == packed.read(before, "train").tokens).all()
    assert line.rows(after, "heldout.parquet") == line.rows(before, "heldout.parquet")
    told = [line.manifest(folder).facts["before"] for folder in (before, after)]
    rules = [phase["rules"] for phases in told for phase in phases if phase["name"] == "clean"]
    assert rules[0] == rules[1]
    assert diff(before.as_uri(), after.as_uri())["moved"] == []
