"""Signatures in the store: made once of every shard, and what comes of them is what comes of all texts at once."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from corpus import cut, grams, lsh, match, minhash, said, sign, text
from corpus.settings import MATCH_PARTS, SignSettings
from corpus.shingles import Texts
from corpus.task import Task
from refit.spec import Dedup

if TYPE_CHECKING:
    from tests.data.conftest import Line, Sentences

CHOSEN = Dedup(threshold=0.5, ngram=2)
SETTINGS = CHOSEN.model_dump(exclude={"threshold"})
KEYS, SIZES = "said-keys.npy", "said-sizes.npy"
FORM = "answer as a friendly clerk of the shop would"


def signed_shard(folder: Path, questions: list[str]) -> Path:
    """A shard of clean with these questions; returns that of its signatures."""
    clean, signed = folder / "clean", folder / "sign"
    for made in (clean, signed):
        made.mkdir(parents=True)
    with said.Writer(clean) as out:
        asked = [[{"role": "user", "content": one}, {"role": "assistant", "content": "yes"}] for one in questions]
        out.write("mail", asked, [None] * len(asked))
    (folder / "form.json").write_text(json.dumps([FORM]))
    inputs = {"records": clean, "said_form": folder / "form.json", "asked_form": folder / "form.json"}
    told = sign.run(Task(settings=SignSettings(**SETTINGS), inputs=inputs, folder=signed))
    assert told == {"records_in": len(questions), "records_out": len(questions), "quarantined": 0}
    return signed


def test_what_is_read_of_the_store_is_what_is_signed_in_memory(tmp_path: Path) -> None:
    questions = [[f"{FORM}\nwhere is parcel {n} of {m}, please?" for n in range(m)] for m in (9, 0, 4)]
    shards = [signed_shard(tmp_path / str(number), some) for number, some in enumerate(questions)]
    rows = [np.array(some, np.int64) for some in ([0, 3, 8], [], [1])]
    asks = [text.lines(questions[s][n].partition("\n")[2]) for s in (0, 1, 2) for n in rows[s]]
    for kind, wanted in (("said", [f"{one}\nyes" for one in asks]), ("asked", asks)):
        found = sign.stored(shards, rows, kind)  # type: ignore[arg-type]
        expected = minhash.signed([Texts.of(wanted)], **SETTINGS)
        assert found.bands == expected.bands == CHOSEN.bands
        assert found.sizes.tolist() == expected.sizes.tolist()
        for band in range(found.bands):
            assert found.band(band).tolist() == expected.band(band).tolist()
        some = sign.stored(shards, rows, kind, range(1, CHOSEN.bands, 5))  # type: ignore[arg-type]
        assert [some.band(at).tolist() for at in range(some.bands)] == [found.band(at).tolist() for at in (1, 6, 11)]


def test_only_texts_that_share_a_key_are_read_and_the_clusters_are_those_of_all_texts() -> None:
    rng = np.random.default_rng(3)
    texts = [" ".join(map(str, rng.integers(0, 5000, 40))) for _ in range(300)]
    texts += [one.replace(" ", " and ", 1) for one in texts[:30]] + ["!!", ""]
    asked: list[list[int]] = []

    def given(rows: np.ndarray) -> Iterable[Texts]:
        asked.append(rows.tolist())
        own = [texts[row] for row in rows]
        return [Texts.of(own[at : at + 7]) for at in range(0, len(own), 7)]

    every = given(np.arange(len(texts)))
    expected = lsh.clusters(every, CHOSEN)
    asked.clear()
    found = lsh.near_pairs(minhash.signed(every, **SETTINGS), given, CHOSEN)
    assert lsh.connected(len(texts), found.left, found.right).tolist() == expected.root.tolist()
    assert (found.candidates, len(found.left)) == (expected.candidate_pairs, expected.verified_pairs)
    pairs = sorted(zip(found.left.tolist(), found.right.tolist(), strict=True))
    assert pairs == [(number, 300 + number) for number in range(30)]
    assert asked == [[*range(30), *range(300, 330)]]
    sets = grams.sets_of(lsh.whole(every), np.arange(len(texts)), np.full(len(texts), 60), CHOSEN.ngram)
    assert found.similarity.tolist() == sets.similarity(found.left, found.right).tolist()


def test_parts_of_the_bands_connect_what_all_bands_connect() -> None:
    rng = np.random.default_rng(5)
    texts = [" ".join(map(str, rng.integers(0, 5000, 40))) for _ in range(100)]
    # Chains: each is near to the one before it, and by its own bands to few others.
    for turn in range(4):
        texts += [one.replace(str(one.split()[turn * 9]), "changed") for one in texts[-60:]]
    every = [Texts.of(texts)]
    whole = minhash.signed(every, **SETTINGS)
    expected = lsh.clusters(every, CHOSEN)
    left, right = [], []
    for part in range(MATCH_PARTS):
        own = match.bands_of(part, CHOSEN)
        some = minhash.Signed(len(own), whole.sizes, lambda number, own=own: whole.band(own[number]))  # type: ignore[misc]
        found = lsh.near_pairs(some, lambda rows: [Texts.of([texts[row] for row in rows])], CHOSEN)
        left, right = [*left, *found.left.tolist()], [*right, *found.right.tolist()]
    assert lsh.connected(len(texts), np.array(left), np.array(right)).tolist() == expected.root.tolist()
    assert expected.verified_pairs > 200


def test_the_keys_of_all_bands_are_never_in_memory_at_once(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    keys = rng.integers(0, 1 << 64, (112, 20_000), np.uint64)
    np.save(tmp_path / KEYS, keys)
    np.save(tmp_path / SIZES, np.ones(20_000, np.int64))
    rows = [np.arange(20_000)]
    found = sign.stored([tmp_path], rows, "said")
    lsh.near_pairs(found, lambda rows: [], Dedup(bands=112))  # loads the kernels
    tracemalloc.start()
    lsh.near_pairs(found, lambda rows: [], Dedup(bands=112))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < keys.nbytes / 3


@pytest.fixture
def growing(line: Line, texts: Sentences, monkeypatch: pytest.MonkeyPatch) -> Line:
    """A line of two sources in several shards; more comes in a file of its own (`deliver_more`)."""
    monkeypatch.setattr(cut, "SHARD_BYTES", 4000)
    many = texts(160)
    line.data.update(label_key=None, expect={"min_records": 10}, dedup={"threshold": 0.6})
    line.deliver("mail", asked([f"{FORM}\n{one}" for one in many[:15]] + many[15:80]))
    line.deliver("chat", asked(many[80:]))
    return line


def asked(questions: list[str]) -> list[dict[str, str]]:
    return [{"prompt": one, "completion": f"about {one.split()[-1]}"} for one in questions]


def deliver_more(line: Line, texts: Sentences, form: str = "") -> None:
    """Thirty questions more, after `form`, and one that is near to one that was there."""
    old = texts(160)[40]
    line.deliver("mail", asked([f"{form}\n{one}" for one in texts(190)[160:]] + [f"well {old}"]), "second.jsonl")


def phases(answer: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {phase["name"]: phase for phase in answer["phases"]}


def ran(answer: dict[str, Any]) -> list[str]:
    return [name for name, phase in phases(answer).items() if not phase["cached"]]


def from_scratch(line: Line, folder: Path) -> bool:
    """Whether a run in a store of its own gives the same files as `folder` has, and removes the same."""
    line.store = f"file://{line.folder}/scratch"
    other = line.dataset()
    removed = [line.rows(line.phase(one, "dedup"), "removed.parquet") for one in (folder, other)]
    assert "near" in {row["how"] for row in removed[0]}
    return removed[0] == removed[1] and line.manifest(folder).files == line.manifest(other).files


def signatures(line: Line) -> dict[str, int]:
    """The shards' folders of signatures, and when each was written."""
    folder = Path(line.store.removeprefix("file://")) / "datasets" / "small" / "shards" / "sign"
    return {shard.name: (shard / KEYS).stat().st_mtime_ns for shard in folder.iterdir()}


def test_a_delivery_more_is_signed_alone_and_the_dataset_is_that_of_a_run_from_nothing(
    growing: Line, texts: Sentences
) -> None:
    growing.dataset()
    before = signatures(growing)
    deliver_more(growing, texts)
    code, answer = growing.prepare()
    assert code == 0, answer
    told = phases(answer)["sign"]
    assert told["shards"] - told["shards_made"] == len(before) > 3
    after = signatures(growing)
    assert {name: after[name] for name in before} == before
    assert from_scratch(growing, Path(answer["manifest"].removeprefix("file://")).parent)


def test_a_form_that_comes_up_signs_its_source_again_and_no_other(growing: Line, texts: Sentences) -> None:
    """Fifteen texts with a line are fifteen texts; with thirty more of them, the line is the source's form."""
    growing.dataset()
    before = signatures(growing)
    deliver_more(growing, texts, FORM)
    code, answer = growing.prepare()
    assert code == 0, answer
    told, clean = phases(answer)["sign"], phases(answer)["clean"]
    kept = told["shards"] - told["shards_made"]
    assert clean["shards_made"] < told["shards_made"] < told["shards"]
    assert 0 < kept < len(before)
    folder = Path(answer["manifest"].removeprefix("file://")).parent
    (form,) = (growing.phase(folder, "clean") / "forms" / "said").glob("mail.json")
    assert json.loads(form.read_text()) == [FORM]
    assert from_scratch(growing, folder)


def test_another_threshold_signs_nothing_and_another_seed_everything_beside_it(growing: Line) -> None:
    growing.dataset()
    before = signatures(growing)
    code, answer = growing.prepare("--set", "data.dedup.threshold=0.3")
    assert code == 0, answer
    assert ran(answer)[0] == "match"
    assert signatures(growing) == before
    code, answer = growing.prepare("--set", "data.dedup.seed=2")
    assert code == 0, answer
    assert phases(answer)["sign"]["shards_made"] == len(before)
    assert signatures(growing).items() > before.items()


def test_signatures_that_are_damaged_or_gone_are_made_again(growing: Line) -> None:
    folder = growing.dataset()
    shards = sorted((folder.parents[1] / "shards" / "sign").iterdir())
    keys = (shards[0] / KEYS).read_bytes()
    (shards[0] / KEYS).write_bytes(keys[:-8])
    (shards[1] / SIZES).unlink()
    code, answer = growing.prepare("--only", "sign")
    assert (code, ran(answer)) == (0, ["sign"])
    assert phases(answer)["sign"]["shards_made"] == 2
    assert (shards[0] / KEYS).read_bytes() == keys
    assert ran(growing.prepare()[1]) == []
