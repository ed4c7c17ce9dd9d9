"""When a user counts as helped."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from refit.errors import BadInput
from serving.replay import Item, is_resolved, read_items, turns

ITEM = Item([{"role": "user", "content": "?"}], '{"intent": "refund", "sure": true}', "refund")


@pytest.mark.parametrize(
    ("answer", "resolved"),
    [
        ('{"intent": "refund", "sure": true}', True),
        (' {"intent":"refund"}\n', True),
        ('{"intent": "delivery"}', False),
        ('{"intent": "refund"', False),
        ("refund", False),
        ('["refund"]', False),
        ('{"sure": "refund"}', False),
        ("", False),
    ],
)
def test_an_answer_helps_when_its_label_is_the_items(answer: str, resolved: bool) -> None:
    assert is_resolved(ITEM, answer, None) is resolved


def test_the_label_may_be_named_and_may_be_missing() -> None:
    unlabelled = Item([], '{"intent": "refund"}', None)
    assert is_resolved(unlabelled, '{"intent": "refund", "more": 1}', "intent")
    assert not is_resolved(unlabelled, "{}", "other")
    assert is_resolved(Item([], " yes ", None), "yes", None)
    assert not is_resolved(Item([], "yes", None), "no", None)


def test_items_are_read_or_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "heldout.parquet"
    messages = json.dumps([{"role": "user", "content": "?"}])
    pq.write_table(pa.table({"messages": [messages], "answer": ["a"], "label": [None], "id": ["1"]}), path)
    assert read_items(path) == [Item([{"role": "user", "content": "?"}], "a", None)]
    pq.write_table(pa.table({"id": ["1"]}), path)
    with pytest.raises(BadInput, match=r"heldout\.parquet: cannot be read as held-out items"):
        read_items(path)
    with pytest.raises(BadInput, match="cannot be read"):
        read_items(tmp_path / "missing")


def test_everybody_asks_once_before_anybody_asks_twice() -> None:
    asking = turns(50, random.Random(1))
    first, second = ([next(asking) for _ in range(50)] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
