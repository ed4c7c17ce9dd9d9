"""Sides that stay when data grows, and nothing on two of them."""

from __future__ import annotations

import numpy as np
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from corpus import minhash
from corpus.rows import SIDES
from corpus.shingles import Texts
from corpus.split import contaminated, side
from refit.spec import Dedup, Split

SPLIT = Split(heldout=0.3, validation=0.2)


@given(st.lists(st.tuples(st.none() | st.text(max_size=5), st.text(max_size=20)), max_size=30), st.data())
def test_a_record_keeps_its_side_when_data_grows(records: list[tuple[str | None, str]], data: st.DataObject) -> None:
    """The side follows from the record alone, so what else there is cannot move it; sessions are never cut."""
    sides = [side(SPLIT, session, question) for session, question in records]
    more = data.draw(st.permutations(records))
    assert sorted(sides) == sorted(side(SPLIT, session, question) for session, question in more)
    by_session: dict[str, set[str]] = {}
    for (session, _), where in zip(records, sides, strict=True):
        if session is not None:
            by_session.setdefault(session, set()).add(where)
    assert all(len(places) == 1 for places in by_session.values())


def test_a_share_only_ever_moves_the_records_of_its_own_growth() -> None:
    questions = [f"question {n}" for n in range(2000)]
    small = {question for question in questions if side(Split(heldout=0.1), None, question) == "heldout"}
    big = {question for question in questions if side(Split(heldout=0.2), None, question) == "heldout"}
    assert small < big
    assert 0.08 < len(small) / 2000 < 0.12


def test_sessions_and_texts_with_one_name_are_different_units() -> None:
    drawn = {side(Split(heldout=0.5, validation=0, salt=str(n)), "a", "") == "heldout" for n in range(20)}
    same = [
        side(Split(heldout=0.5, validation=0, salt=str(n)), "a", "") == side(Split(heldout=0.5, salt=str(n)), None, "a")
        for n in range(40)
    ]
    assert drawn == {True, False}
    assert not all(same)


def test_another_salt_is_another_exam() -> None:
    questions = [f"question {n}" for n in range(500)]
    first, second = (
        {question for question in questions if side(Split(heldout=0.3, salt=salt), None, question) == "heldout"}
        for salt in "ab"
    )
    assert first != second


def test_a_plain_text_is_never_held_out() -> None:
    assert {side(Split(heldout=0.9, validation=0), None, str(n), plain=True) for n in range(50)} == {"train"}


def ranks(*names: str) -> np.ndarray:
    return np.array([SIDES.index(name) for name in names], np.int64)


def gone(asked: list[str], rank: np.ndarray) -> set[tuple[int, int, str]]:
    keys = np.frombuffer(b"".join(xxhash.xxh3_128_digest(one.encode()) for one in asked), np.uint64).reshape(-1, 2)

    def texts(left: np.ndarray) -> list[Texts]:
        return [Texts.of([asked[row]]) for row in left]

    def signed(left: np.ndarray) -> minhash.Signed:
        return minhash.signed(texts(left), **Dedup().model_dump(exclude={"threshold"}))

    found = contaminated(keys, rank, signed, texts, Dedup())
    return set(zip(found.row.tolist(), found.kept.tolist(), found.how, strict=True))


def test_the_less_protected_of_two_equal_questions_goes() -> None:
    asked = ["same", "same", "same", "other"]
    assert gone(asked, ranks("train", "heldout", "validation", "train")) == {(0, 1, "exact"), (2, 1, "exact")}


def test_a_near_question_in_training_goes_and_two_near_ones_in_training_stay() -> None:
    long = " ".join(f"word{n}" for n in range(60))
    asked = [long + " today", long + " tomorrow", long + " never", "quite another matter that nobody asked before"]
    assert gone(asked, ranks("train", "heldout", "train", "heldout")) == {(0, 1, "near"), (2, 1, "near")}
    assert gone(asked, ranks("train", "train", "train", "heldout")) == set()
