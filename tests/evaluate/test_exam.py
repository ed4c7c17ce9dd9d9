"""Which items are asked, and what counts as a right answer."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evaluator.exam import Item, business_items, exam, general_items
from evaluator.metrics import METRICS, correct, passes, valid
from refit import fingerprint
from refit.errors import BadInput
from refit.spec import Evaluate

from .conftest import rows

SPEC = Evaluate(labels=("refund", "praise"), label_key="intent")


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(records), path)
    return path


def ids(items: list[Item]) -> set[str]:
    return {item.id for item in items}


def test_a_smaller_exam_is_part_of_a_larger_one_and_order_does_not_matter(tmp_path: Path):
    here = write(tmp_path / "a.parquet", rows(200))
    turned = write(tmp_path / "b.parquet", rows(200)[::-1])
    few, many = ids(business_items(here, 50)), ids(business_items(here, 100))
    assert len(few) == 50
    assert few < many
    assert business_items(turned, 50) == business_items(here, 50)


def test_more_data_keeps_most_of_the_exam(tmp_path: Path):
    before = ids(business_items(write(tmp_path / "a.parquet", rows(1000)), 300))
    after = ids(business_items(write(tmp_path / "b.parquet", rows(1100)), 300))
    assert len(before & after) > 250


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([], "cannot be read|0 held-out items"),
        ([*rows(3), *rows(1)], "ids occur twice"),
        ([{**rows(1)[0], "messages": "{not json"}], "ticket-00000: messages are not JSON"),
        ([{"id": "a"}], "cannot be read"),
    ],
)
def test_a_broken_held_out_file_is_bad_input(tmp_path: Path, records: list[dict[str, Any]], said: str):
    with pytest.raises(BadInput, match=said):
        business_items(write(tmp_path / "h.parquet", records), 10)


def test_a_missing_held_out_file_is_bad_input(tmp_path: Path):
    with pytest.raises(BadInput, match="cannot be read"):
        business_items(tmp_path / "h.parquet", 10)


def test_an_item_changes_its_digest_with_its_question_and_with_what_is_right(tmp_path: Path):
    [item] = business_items(write(tmp_path / "a.parquet", rows(1)), 1)
    other = {**rows(1)[0], "label": "praise"}
    [relabelled] = business_items(write(tmp_path / "b.parquet", [other]), 1)
    assert item.id == relabelled.id
    assert item.digest != relabelled.digest


def test_the_general_set_is_asked_only_where_it_is_wanted(tmp_path: Path):
    path = write(tmp_path / "h.parquet", rows(5))
    assert {item.set for item in exam(path, Evaluate(general=False))} == {"business"}
    assert len(exam(path, Evaluate(general=True))) == 5 + len(general_items())


# ------------------------------------------------------------------------------------------------------- general set


GENERAL = [
    json.loads(line)
    for line in resources.files("evaluator").joinpath("sets", "general.jsonl").read_text("utf-8").splitlines()
]


@pytest.mark.parametrize("row", GENERAL, ids=[row["id"] for row in GENERAL])
def test_every_general_check_passes_its_example_and_refuses_others(row: dict[str, Any]):
    assert passes(row["check"], row["example"])
    for wrong in ("", "I cannot help with that.", '{"intent": "refund"}', "13", row["prompt"]):
        # The question itself is no answer either, unless it asks to be repeated.
        assert not passes(row["check"], wrong) or wrong == row["prompt"]


def test_the_general_set_has_its_size_and_no_item_twice():
    assert len(GENERAL) >= 40
    assert len({row["id"] for row in GENERAL}) == len({row["prompt"] for row in GENERAL}) == len(GENERAL)


def test_a_changed_set_or_metric_list_raises_the_recipe_version():
    """Evaluations are found by name, and the set is not in the name: change this digest together with the version."""
    asked = fingerprint.digest([item.digest for item in general_items()])[:16]
    assert (fingerprint.RECIPE_VERSION["evaluate"], asked, sorted(METRICS)) == (
        "1",
        "eb6e7d9ff1d708b2",
        ["correct", "valid"],
    )


# ----------------------------------------------------------------------------------------------------------- metrics


ITEM = Item(set="business", id="1", domain="mail", messages=(), reference='{"intent": "refund"}', label="refund")


@pytest.mark.parametrize(
    ("answer", "is_valid", "is_correct"),
    [
        ('{"intent": "refund"}', True, True),
        (' {"intent":"refund"}\n', True, True),
        ('{"intent": "refund", "sure": true}', True, True),
        ('{"intent": "praise"}', True, False),
        ('{"intent": "Refund"}', False, False),
        ('{"intent": "lunch"}', False, False),
        ('{"intent": ["refund"]}', False, False),
        ('{"label": "refund"}', False, False),
        ('```json\n{"intent": "refund"}\n```', False, False),
        ('{"intent": "refund"} Anything else?', False, False),
        ('"refund"', False, False),
        ("refund", False, False),
        ('{"intent": "ref', False, False),
        ("[" * 100_000, False, False),
        ("", False, False),
    ],
)
def test_an_answer_is_read_as_strictly_as_in_production(answer: str, is_valid: bool, is_correct: bool):
    assert (valid(ITEM, answer, SPEC), correct(ITEM, answer, SPEC)) == (is_valid, is_correct)


def test_an_item_without_a_label_is_never_right_by_having_none():
    nameless = Item(set="business", id="1", domain="mail", messages=(), reference="", label=None)
    assert not correct(nameless, "no JSON at all", SPEC)


def test_without_a_label_key_the_text_must_be_the_reference():
    free = Evaluate()
    assert correct(ITEM, ' {"intent": "refund"} ', free)
    assert not correct(ITEM, "refund", free)
    assert not valid(ITEM, "  ", free)


def test_an_unknown_check_is_an_error_and_not_a_wrong_answer():
    with pytest.raises(ValueError, match="unknown check 'fuzzy'"):
        passes({"fuzzy": "x"}, "x")


def test_contains_asks_for_words_not_letters():
    assert passes({"contains": ["ice"]}, "It is called ICE.")
    assert not passes({"contains": ["ice"]}, "Rice and mice.")
    assert not passes({"contains": ["Paris", "France"]}, "Paris.")
