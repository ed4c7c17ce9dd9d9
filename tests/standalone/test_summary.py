"""The end of a demo: nothing is invented, and a person can read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from standalone.demo.summary import Finished, page, summarize


def finished(tmp_path: Path, **changes: Any) -> Finished:
    output = tmp_path / "training"
    output.mkdir(exist_ok=True)
    events = [("running", 10), ("succeeded", 40)]
    lines = [json.dumps({"at": f"2026-01-01T00:00:{s:02}+00:00", "state": state}) for state, s in events]
    (output / "events.jsonl").write_text("\n".join(lines) + "\n")
    tasks = tmp_path / "run" / "tasks"
    tasks.mkdir(parents=True, exist_ok=True)
    record = {"task": "train.train", "job": "j", "kind": "train", "output": output.as_uri(), "at": 1.0}
    (tasks / "train.train.json").write_text(json.dumps(record))
    known: dict[str, Any] = {
        "pipeline": "tiny", "run_id": "r", "folder": (tmp_path / "run").as_uri(),
        "outcome": {"outcome": "already champion", "why": "nothing changed", "candidate": "c", "champion": "c"},
        "run": {"start_date": "2026-01-01T00:00:00Z", "end_date": "2026-01-01T00:01:00Z"},
        "tasks": [{"task_id": "train.train", "state": "success", "start_date": "2026-01-01T00:00:05Z",
                   "end_date": "2026-01-01T00:00:45Z"}],
        "rollout": None, "requests": {"total": 5, "failed": 0, "failed_on_killed": 0}, "split": 0,
        "peak_memory_bytes": 3_000_000_000, "addresses": {"airflow": "http://127.0.0.1:1"},
    }  # fmt: skip
    return Finished(**{**known, **changes})


def test_what_a_run_did_not_come_to_is_null_or_empty(tmp_path: Path) -> None:
    summary = summarize(finished(tmp_path))
    assert summary["candidate"] == {"release": "c", "score": None, "low": None, "high": None}
    assert summary["difference"] is None
    assert summary["verdicts"] == summary["splits"] == []
    assert summary["seconds"] == {"train": 40.0}
    assert (summary["wall_seconds"], summary["overhead_ratio"]) == (60.0, 0.5)


def test_the_page_says_scores_split_and_verdicts(tmp_path: Path) -> None:
    score = {"release": "aaaa", "score": 0.5, "low": 0.4, "high": 0.6}
    outcome = {
        "outcome": "promoted", "why": "better",
        "comparison": {"verdict": "pass", "forced": False, "why": "better", "champion": score,
                       "candidate": {**score, "release": "bbbb", "score": 0.9},
                       "difference": {"value": 0.4, "low": 0.3, "high": 0.5}},
    }  # fmt: skip
    journal = [
        {"at": 1767225641.0, "step": 1, "weight": 5, "action": "entered", "verdict": None, "why": "5 %"},
        {"at": 1767225650.0, "step": 1, "weight": 5, "action": "judged", "verdict": "pass", "why": "not worse"},
        {"at": 1767225651.0, "step": 2, "weight": 100, "action": "entered", "verdict": None, "why": "100 %"},
        {"at": 1767225655.0, "step": 2, "weight": 0, "action": "finished", "verdict": None, "why": "champion"},
    ]
    summary = summarize(finished(tmp_path, outcome=outcome, rollout={"journal": journal}))
    text = "\n".join(page(summary))
    assert [split["weight"] for split in summary["splits"]] == [5, 100]
    assert summary["verdicts"] == [{"step": 1, "verdict": "pass", "why": "not worse"}]
    for words in ("promoted", "+90.0%", "+40.0%  [+30.0%, +50.0%]", "5 % → 100 %", "step 1: pass: not worse"):
        assert words in text
