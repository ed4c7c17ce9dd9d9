"""Tokenize, mask and pack as TRL does it: `python peers_packing.py FILE COUNT LENGTH PROCESSES`, in a venv that has it.

The steps, their order and their functions are those of `SFTTrainer._prepare_dataset` in TRL 1.16 for conversations of a
prompt and a completion, with packing "bfd"; only the trainer around them, which wants a model, is left out. FILE is
jsonl of {"prompt": [message], "completion": [message]}; the folder `tokenizer` is beside it. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from datasets import Dataset, disable_caching, disable_progress_bars
from transformers import AutoTokenizer
from trl.data_utils import _tokenize, common_prefix_length, pack_dataset


def tokenized(example: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Ids and the completion's mask."""
    prompt = _tokenize(tokenizer, example["prompt"], add_generation_prompt=True)["input_ids"]
    whole = _tokenize(tokenizer, example["prompt"] + example["completion"])["input_ids"]
    length = common_prefix_length(prompt, whole)
    return {"input_ids": whole, "completion_mask": [0] * length + [1] * (len(whole) - length)}


def labelled(example: dict[str, Any]) -> dict[str, Any]:
    """Labels, -100 where nothing is learnt."""
    pairs = zip(example["input_ids"], example["completion_mask"], strict=True)
    return {"labels": [token if learnt else -100 for token, learnt in pairs]}


def run(rows: list[dict[str, Any]], tokenizer: Any, length: int, processes: int) -> Dataset:
    """The packs."""
    workers = processes if processes > 1 else None
    data = Dataset.from_list(rows)
    data = data.map(tokenized, fn_kwargs={"tokenizer": tokenizer}, num_proc=workers)
    data = data.map(labelled, remove_columns=["completion_mask"], num_proc=workers)
    data = data.select_columns(["input_ids", "labels"])
    return pack_dataset(data, length, "bfd", {"num_proc": workers})


def main() -> None:
    """Run it, after a small run to warm up."""
    file, count, length, processes = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    disable_caching()
    disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(file.parent / "tokenizer")
    with file.open(encoding="utf-8") as handle:
        rows = [json.loads(line) for _, line in zip(range(count), handle, strict=False)]
    run(rows[:200], tokenizer, length, processes)
    started = time.perf_counter()
    packs = run(rows, tokenizer, length, processes)
    seconds = time.perf_counter() - started
    tokens = sum(map(len, packs["input_ids"]))
    print(json.dumps({"documents": len(rows), "packs": len(packs), "tokens": tokens, "seconds": seconds}))


if __name__ == "__main__":
    main()
