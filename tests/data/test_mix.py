"""Shares that are what the weights ask, whole rounds, and a drill that spoils training and nothing else."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corpus import record
from corpus.mix import rounds, shares, shuffle_answers, tempered
from corpus.record import Record


@given(st.dictionaries(st.sampled_from("abcdef"), st.tuples(st.integers(0, 500), st.floats(0, 10)), min_size=1))
def test_shares_sum_to_the_epoch_and_follow_the_weights(given: dict[str, tuple[int, float]]) -> None:
    counts = {name: count for name, (count, _) in given.items()}
    weights = {name: weight for name, (_, weight) in given.items()}
    goals = shares(counts, weights)
    live = {name for name in given if counts[name] and weights[name] > 0}
    assert goals.keys() == live
    total = sum(counts[name] for name in live)
    for name, goal in goals.items():
        exact = total * weights[name] / sum(weights[other] for other in live)
        assert goal == max(1, goal)
        assert abs(goal - exact) < 1 or goal == 1
    assert total <= sum(goals.values()) <= total + len(live)


def test_extreme_weights_give_the_small_source_something() -> None:
    assert shares({"a": 10, "b": 500}, {"a": 0.001, "b": 0.999}) == {"a": 1, "b": 509}


def test_a_source_without_weight_is_not_seen() -> None:
    assert shares({"a": 10, "b": 10}, {"a": 0, "b": 3}) == {"b": 10}


@given(st.integers(1, 50), st.integers(0, 200))
def test_rounds_are_fair_and_sum_up(records: int, goal: int) -> None:
    times = rounds(records, goal, np.random.default_rng(1))
    assert times.sum() == goal
    assert times.max() - times.min() <= 1


def conversation(n: int) -> Record:
    messages = [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": json.dumps({"n": n})}]
    return Record(str(n), "s", "f", n, None, None, "d", str(n), None, record.dump(messages))


def numbered(count: int, source: str = "s", spared: str = "s") -> pa.Table:
    """Rows whose labels are their numbers; every other one is of the source `spared`."""
    return pa.table(
        {
            "shard": pa.array([0] * count, pa.int32()), "row": pa.array(range(count), pa.int32()),
            "source": [(source, spared)[n % 2] for n in range(count)], "label": [str(n) for n in range(count)],
        }
    )  # fmt: skip


def test_the_drill_gives_questions_other_answers_with_their_labels() -> None:
    drilled = shuffle_answers(numbered(50), np.random.default_rng(1)).to_pylist()
    assert [row["row"] for row in drilled] == list(range(50)), "what is asked stays"
    assert [row["answer_row"] for row in drilled] == [int(row["label"]) for row in drilled]
    assert sorted(row["answer_row"] for row in drilled) == list(range(50))
    assert sum(row["answer_row"] == row["row"] for row in drilled) < 5


def test_records_make_a_table_of_the_canonical_schema() -> None:
    assert record.to_table([]).schema == record.to_table([conversation(1)]).schema == record.SCHEMA
    with pytest.raises(pa.ArrowInvalid):
        record.to_table([conversation(1)._replace(line="x")])  # type: ignore[arg-type]


def test_the_drill_leaves_a_spared_source_alone() -> None:
    drilled = shuffle_answers(numbered(50, spared="spared"), np.random.default_rng(1), spare=["spared"])
    answers = drilled["answer_row"].to_pylist()
    assert answers[1::2] == list(range(1, 50, 2))
    assert answers[::2] != list(range(0, 50, 2))
    assert sorted(answers) == list(range(50))


def test_a_temperature_lets_sizes_count() -> None:
    counts, weights = {"big": 900, "small": 100}, {"big": 1.0, "small": 1.0}
    assert shares(counts, tempered(weights, counts, None)) == {"big": 500, "small": 500}
    assert shares(counts, tempered(weights, counts, 1)) == {"big": 900, "small": 100}
    assert shares(counts, tempered(weights, counts, 2)) == {"big": 750, "small": 250}
    assert shares(counts, tempered(weights, counts, 1000)) == {"big": 501, "small": 499}
    assert tempered({"none": 1.0}, {"none": 0}, 2) == {"none": 0.0}
