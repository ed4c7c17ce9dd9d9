"""Real public deliveries, where the environment says where they lie (REFIT_SHARED_DATA); skipped elsewhere."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from refit.store import store_for

if TYPE_CHECKING:
    from tests.data.conftest import Line

SHARED = Path(os.environ.get("REFIT_SHARED_DATA", "/nonexistent"))
pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="REFIT_SHARED_DATA names no folder of public data")


def prepared(line: Line, file: str, **source: Any) -> tuple[Path, dict[str, dict[str, Any]]]:
    """The dataset of one file, and what each phase told."""
    line.data["sources"].append({"name": "given", "uri": f"file://{SHARED / file}", **source})
    line.data.update(label_key=None, system="", pack_length=8192)
    folder = line.dataset()
    found = store_for("file:///").manifest(folder.as_uri())
    assert found
    return folder, {phase["name"]: phase for phase in found.facts["before"]}


@pytest.mark.parametrize(("file", "records"), [("sft/alpaca_en_demo.json", 999), ("sft/alpaca_zh_demo.json", 1000)])
def test_curated_instructions_are_kept(line: Line, file: str, records: int) -> None:
    """A rule that throws good answers away is worse than none."""
    _, told = prepared(line, file)
    assert told["ingest"]["records_out"] == records
    assert told["clean"]["quarantined"] <= records // 100
    assert told["dedup"]["removed"]["near"] == 0


def test_banking_queries_lose_their_near_duplicates_and_the_exam_has_none_of_training(line: Line) -> None:
    columns = {"prompt": "text", "completion": "category"}
    folder, told = prepared(line, "banking77/train.csv", format="prompt", columns=columns)
    assert told["ingest"]["records_in"] == 10_003
    assert 50 < sum(told["dedup"]["removed"].values()) < 150
    removed = pq.read_table(next((folder.parents[1] / "dedup").iterdir()) / "removed.parquet").to_pylist()
    assert all(row["similarity"] >= 0.5 for row in removed)
    assert sum(told["split"]["removed"].values()) > 0


def test_web_text_is_packed_whole(line: Line) -> None:
    line.data["split"] = {"heldout": 0, "validation": 0.1}
    folder, told = prepared(line, "sft/c4_demo.jsonl")
    assert told["ingest"]["records_out"] == 300
    found = store_for("file:///").manifest(folder.as_uri())
    assert found
    assert found.facts["quarantined"] == 0
    assert found.facts["tokens"]["train"]["tokens"] > 100_000


@pytest.mark.parametrize(("file", "records"), [("sft/dpo_en_demo.json", 300), ("sft/dpo_zh_demo.json", 300)])
def test_preference_pairs_are_kept_with_both_answers_and_train_on_the_chosen_one(
    line: Line, file: str, records: int
) -> None:
    line.data["max_bad_ratio"] = 0.1
    folder, told = prepared(line, file)
    assert told["ingest"]["records_out"] == records
    given = json.loads((SHARED / file).read_text(encoding="utf-8"))
    (shard,) = (folder.parents[1] / "shards" / "ingest").iterdir()
    rows = pq.read_table(shard / "records.parquet").to_pylist()
    last = [json.loads(row["messages"])[-1] for row in rows]
    assert [(turn["content"], turn["rejected"]) for turn in last] == [
        (pair["chosen"]["value"], pair["rejected"]["value"]) for pair in given
    ]
    found = store_for("file:///").manifest(folder.as_uri())
    assert found
    assert found.facts["tokens"]["train"]["targets"] > 10_000


def test_conversations_with_tools_are_learnt_call_by_call(line: Line) -> None:
    folder, told = prepared(line, "sft/glaive_toolcall_en_demo.json")
    assert told["ingest"]["records_out"] == 300
    (shard,) = (folder.parents[1] / "shards" / "ingest").iterdir()
    messages = [row["messages"] for row in pq.read_table(shard / "records.parquet").to_pylist()]
    assert sum(text.count('<tool_call>\\n{\\"name\\"') for text in messages) >= 211
    found = store_for("file:///").manifest(folder.as_uri())
    assert found
    assert found.facts["tokens"]["train"]["targets"] > 10_000
