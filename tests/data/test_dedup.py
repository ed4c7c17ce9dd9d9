"""What counts as the same text; and the arrays that decide it, against plain twins and datasketch."""

from __future__ import annotations

import itertools
import mmap
import unicodedata
from collections import Counter

import datasketch
import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus import grams as sets
from corpus import letters, lsh, match, minhash, shingles, text
from corpus.dedup import duplicates
from corpus.keeping import first_of_each
from corpus.lsh import Pairs
from corpus.removed import Removals
from corpus.settings import MATCH_PARTS
from corpus.shingles import Texts
from refit.spec import Dedup

MASK = (1 << 64) - 1


def mix64(value: int) -> int:
    value = (value ^ value >> 33) * 0xFF51AFD7ED558CCD & MASK
    value = (value ^ value >> 33) * 0xC4CEB9FE1A85EC53 & MASK
    return value ^ value >> 33


def words(given: str) -> list[str]:
    """The plain twin of `shingles.words`."""
    found, inside = [""], False
    for character in given:
        point = ord(character)
        alone = point >= 0x80 and shingles.is_word_alone(point)
        separates = shingles.is_separator(point) if point >= 0x80 else not character.isalnum()
        if separates or alone or not inside:
            found.append("")
        if not separates:
            found[-1] += character.lower() if point < 0x80 else character
        inside = not separates and not alone
    return [word for word in found if word]


def grams(given: str, n: int) -> list[int]:
    """The plain twin of `shingles.shingle`."""
    hashes = []
    for word in words(given):
        value, data = 0x9E3779B97F4A7C15, word.encode()
        for at in range(0, len(data) // 8 * 8, 8):
            value = mix64(value ^ int.from_bytes(data[at : at + 8], "little"))
        hashes.append(mix64(value ^ int.from_bytes(data[len(data) // 8 * 8 :], "little")))
    n = min(n, len(hashes))
    found = []
    for first in range(len(hashes) - n + 1 if n else 0):
        value = n
        for word_hash in hashes[first : first + n]:
            value = (value * 0x9E3779B97F4A7C15 + word_hash) & MASK
        found.append(mix64(value))
    return found


def jaccard(left: str, right: str, n: int) -> float:
    a, b = set(grams(left, n)), set(grams(right, n))
    return len(a & b) / len(a | b) if a | b else 0.0


def found_in(texts: list[str], order: list[int], **chosen: float) -> Removals:
    """What goes of the texts of one source; those to keep come first in `order`."""
    given = [text.lines(one) for one in texts]
    digests = b"".join(xxhash.xxh3_128_digest(one.replace("\n", " ").encode()) for one in given)
    counts = Counter(line for one in dict.fromkeys(given) for line in set(one.split("\n")))
    form = text.form(counts, len(set(given)))

    def parts(left: np.ndarray) -> list[Texts]:
        own = [text.without(given[row], form) for row in left]
        return [Texts.of(own[at : at + 7]) for at in range(0, len(own), 7)]  # shards of seven

    def similarity(left: np.ndarray, right: np.ndarray) -> np.ndarray:
        stripped = [text.without(one, form) for one in given]
        return np.array([jaccard(stripped[i], stripped[j], settings.ngram) for i, j in zip(left, right, strict=True)])

    settings = Dedup(**chosen)  # type: ignore[arg-type]
    rank = np.argsort(np.array(order))
    keys = np.frombuffer(digests, np.uint64).reshape(-1, 2)
    first = first_of_each(keys, rank)
    left = np.flatnonzero(first == np.arange(len(first)))
    whole = minhash.signed(parts(left), **settings.model_dump(exclude={"threshold"}))
    pairs = []
    for part in range(MATCH_PARTS):
        own = match.bands_of(part, settings)
        some = minhash.Signed(len(own), whole.sizes, lambda number, own=own: whole.band(own[number]))  # type: ignore[misc]
        pairs.append(lsh.near_pairs(some, lambda shared: parts(left[shared]), settings))
    ends = [left[np.concatenate([getattr(one, side) for one in pairs])] for side in ("left", "right")]
    return duplicates(keys, rank, Pairs(*ends, np.concatenate([one.similarity for one in pairs]), 0), similarity)


def removed(texts: list[str], **chosen: float) -> list[tuple[int, int, str]]:
    found = found_in(texts, list(range(len(texts))), **chosen)
    return sorted(zip(found.row.tolist(), found.kept.tolist(), found.how, strict=True))


ASCII = st.text(st.characters(max_codepoint=127), max_size=300) | st.text(
    st.sampled_from("aZ09 .@[`{\x7f\n"), max_size=300
)


HAN = st.text(st.sampled_from("退款时，。？aZ9 \u3fff\u4000\u9fff\ua000かカ가é\U00020000"), max_size=80)


@settings(max_examples=400, deadline=None)
@given(st.text(max_size=80) | ASCII | HAN, st.integers(1, 6), st.sampled_from(["", "and something after it"]))
def test_shingles_equal_their_plain_twin(given: str, n: int, after: str) -> None:
    """ASCII is read eight bytes at a time unless it is the last text, Han three, the rest a character at a time."""
    texts = Texts.of(["before", given, after])
    out = np.zeros(shingles.room(texts.offsets[1], texts.offsets[2]), np.uint64)
    count = shingles.shingle(texts.data, texts.offsets[1], texts.offsets[2], n, out)
    assert out[:count].tolist() == grams(given, n)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, (1 << 32) - 1), max_size=50), st.integers(1, 5))
def test_signatures_are_datasketch_s_given_the_same_hashes(hashes: list[int], seed: int) -> None:
    oracle = datasketch.MinHash(num_perm=112, seed=seed, hashfunc=lambda value: value)
    oracle.update_batch(hashes)
    a, b = minhash.permutations(112, seed)
    ours = np.empty(112, np.uint32)
    minhash.sign(np.array(hashes, np.uint32), len(hashes), a, b, ours)
    assert ours.tolist() == oracle.hashvalues.tolist()


def test_keys_are_of_the_signatures_of_the_upper_halves_of_their_grams() -> None:
    given = "the quick brown fox jumps over the lazy dog"
    keys, sizes = np.zeros((8, 2), np.uint64), np.zeros(2, np.int64)
    minhash.band_keys(Texts.of([given, "!?"]), 5, 2, 1, keys, sizes)
    oracle = datasketch.MinHash(num_perm=16, seed=1, hashfunc=lambda value: value >> 32)
    oracle.update_batch(grams(given, 5))
    for band, (first, second) in enumerate(oracle.hashvalues.reshape(8, 2).tolist()):
        key = (band ^ first) * 0x9E3779B97F4A7C15 & MASK
        assert keys[band, 0] == mix64((key ^ second) * 0x9E3779B97F4A7C15 & MASK)
    assert sizes.tolist() == [5, 0]


def test_similarity_is_the_exact_jaccard_of_the_sets() -> None:
    given = ["a b c d e f g h", "a b c d e f g x", "x y z", "a a a a a a a a"]
    given += given
    pairs = [(i, j) for i in range(8) for j in range(8)]
    left, right = (np.array(side) for side in zip(*pairs, strict=True))
    parts = [Texts.of(given[:2]), Texts.of(given[2:])]
    found = sets.sets_of(lsh.whole(parts), np.arange(8), np.full(8, 8), 2).similarity(left, right)
    assert found.tolist() == pytest.approx([jaccard(given[i], given[j], 2) for i, j in pairs])


LONG = "the parcel that I ordered three weeks ago has still not come and nobody answers my letters about the money"


def test_line_breaks_case_blanks_and_composition_make_no_other_text() -> None:
    same = ["Café au lait\nplease", "café  au lait\r\nplease", unicodedata.normalize("NFD", "CAFÉ au lait\rplease")]
    assert removed(same) == [(1, 0, "exact"), (2, 0, "exact")]


def test_a_changed_word_in_a_long_text_is_a_near_duplicate() -> None:
    text = " ".join([LONG, *reversed(LONG.split()), *sorted(LONG.split())])
    assert removed([text, text.replace("letters about", "mails about")]) == [(1, 0, "near")]
    assert removed([text, text.upper().replace(" ", " , ") + "!!"]) == [(1, 0, "near")]


def test_templates_that_differ_by_a_number_are_decided_by_the_exact_similarity() -> None:
    short = [f"order {number} has not arrived" for number in range(10)]
    assert removed(short) == []
    padded = [f"{LONG} {' '.join(reversed(LONG.split()))} {number}" for number in range(10)]
    assert [how for _, _, how in removed(padded)] == ["near"] * 9


def test_a_set_contained_in_a_bigger_one_is_no_duplicate() -> None:
    many = " ".join(f"w{n}" for n in range(100))
    assert removed([many, " ".join(f"w{n}" for n in range(40))], threshold=0.5) == []


def test_chinese_that_differs_by_a_character_is_a_near_duplicate() -> None:
    text = (
        "我上个月在你们店里买了一台咖啡机用了三天就坏了打电话没有人接请尽快给我退款或者换一台新的谢谢你们的帮助和理解"
    )
    assert removed([text, text.replace("三天", "五天")], threshold=0.75) == [(1, 0, "near")]


def test_texts_without_words_are_never_clustered() -> None:
    assert removed(["...", "!!!", "", "?!"]) == []


def test_an_instruction_before_every_text_makes_no_duplicates() -> None:
    form = "Classify the sentiment of the following customer message and answer with one word of JSON only please"
    texts = [f"{form}\nitem {n} {'good' if n % 2 else 'bad'}\n{n % 2}" for n in range(60)]
    assert removed(texts) == []


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_what_stays_does_not_depend_on_the_order(data: st.DataObject) -> None:
    base = [f"{LONG} {n} {n + 1} {n * 7}" for n in range(6)]
    texts = base + [one.replace("weeks", "days") for one in base[:3]] + [base[0].upper(), "short", "short"]
    order = data.draw(st.permutations(range(len(texts))))
    preferred = sorted(range(len(texts)), key=lambda row: (texts[row], row))

    def kept(arrangement: list[int]) -> set[str]:
        given = [texts[row] for row in arrangement]
        order = sorted(range(len(given)), key=lambda at: preferred.index(arrangement[at]))
        gone = set(found_in(given, order, threshold=0.6).row.tolist())
        return {given[at] for at in range(len(given)) if at not in gone}

    assert kept(order) == kept(list(range(len(texts))))


def test_sets_that_are_too_many_for_memory_are_mapped_and_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [f"w{number % 97}" for number in range(4000)]
    said = [" ".join(words[at : at + 40]) for at in range(0, 1500, 3)]
    inside = lsh.clusters([Texts.of(said)], Dedup(threshold=0.5))
    monkeypatch.setattr(sets, "IN_MEMORY", 0)
    outside = lsh.clusters([Texts.of(said)], Dedup(threshold=0.5))
    mapped = sets.sets_of(lsh.whole([Texts.of(said)]), np.arange(len(said)), np.full(len(said), 40), 5)
    assert isinstance(mapped.grams.base, np.memmap | mmap.mmap)
    assert inside.verified_pairs == outside.verified_pairs > 0
    assert (inside.root == outside.root).all()


def test_every_pair_at_the_threshold_is_found() -> None:
    """LSH may miss a pair; with the usual bands it must not miss planted ones well above the threshold."""
    rng = np.random.default_rng(1)
    texts, partners = [], []
    for n in range(200):
        row = rng.integers(0, 5000, 120).tolist()
        other = list(row)
        other[60] = 5001
        texts += [" ".join(map(str, row)), " ".join(map(str, other))]
        partners.append((2 * n + 1, 2 * n, "near"))
    assert removed(texts) == partners


def test_the_oldest_stays_and_everyone_who_went_points_to_it() -> None:
    found = found_in(["hello there", "Hello  there", "hello there"], [2, 0, 1])
    assert (found.row.tolist(), found.kept.tolist()) == ([0, 1], [2, 2])


def test_no_settled_character_is_changed_by_composition_or_case_whatever_stands_before_it() -> None:
    """Exhaustively: no capital, no mark, nothing that a character before it composes with."""
    points = {p for first, last in letters.RANGES for p in range(first, last + 1)} - {*range(ord("A"), ord("Z") + 1)}
    assert [p for p in points if unicodedata.normalize("NFC", chr(p)).lower() != chr(p)] == []
    every = map(chr, [*range(0xD800), *range(0xE000, 0x110000)])
    seconds = {part for one in every for part in unicodedata.normalize("NFD", one)[1:]}
    assert not {ord(second) for second in seconds} & points


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(max_size=30) | st.text(st.sampled_from("aÉé退，か\u3099\u0301Я🙂ＡİΣ가\u11a8"), max_size=30)))
def test_texts_are_compared_composed_and_in_lower_case(texts: list[str]) -> None:
    array = pa.array(texts, pa.large_string())
    found = letters.lowered(array)
    cut = [bytes(found.data[first:last]).lower() for first, last in itertools.pairwise(found.offsets.tolist())]
    assert cut == [unicodedata.normalize("NFC", text).lower().encode() for text in texts]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, MASK) | st.sampled_from([0, 1, 7, MASK]), max_size=200), st.integers(0, 5))
def test_hashes_are_sorted_however_they_are_spread(values: list[int], after: int) -> None:
    given = np.array(values + [3] * after, np.uint64)
    sets.sort_hashes(given, len(values))
    assert given.tolist() == sorted(values) + [3] * after
