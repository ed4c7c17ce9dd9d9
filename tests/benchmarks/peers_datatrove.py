"""datatrove as its own example of MinHash dedup uses it: pipelines of steps from disk to disk.

14 bands of 8 over 5-grams of the words of its English tokenizer (spaCy's, without a model), hashed by xxhash. Workers
are forked, so that what is imported once is imported for all of them. Both functions return the documents that stay.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.pipeline.filters import GopherQualityFilter, GopherRepetitionFilter, LambdaFilter
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer
from datatrove.pipeline.writers import JsonlWriter
from loguru import logger

CONFIG = MinhashConfig(n_grams=5, num_buckets=14, hashes_per_bucket=8, seed=1)
URL = re.compile(r"https?://\S+|www\.\S+")

logger.remove()
logger.add(sys.stderr, level="WARNING")


def near(file: Path, count: int, workers: int) -> int:
    """Near dedup of the first rows, a file a worker."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        _cut(file, count, folder / "in", workers)
        _dedup(folder, workers, JsonlReader(str(folder / "in")), [JsonlWriter(str(folder / "kept"), compression=None)])
        return _lines(folder / "kept")


def prepare(file: Path, count: int, tokenizer: str) -> int:
    """What `corpus prepare` does, as near as its steps come: read, filter, dedup, tokenize; one worker, one thread.

    No held-out set, no mixing, no chat template, no loss mask, no packing, no doors.
    """
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        _cut(file, count, folder / "in", 1)
        quality = GopherQualityFilter(min_doc_words=3, min_stop_words=0)  # invented words hold no English stop words
        repetition = GopherRepetitionFilter(top_n_grams=(), dup_n_grams=((5, 0.3),))  # as our `repeats`
        reader = JsonlReader(str(folder / "in"), adapter=_said)
        kept = JsonlWriter(str(folder / "clean"), compression=None)
        _run(folder, [reader, repetition, quality, LambdaFilter(_few_urls), kept])
        tokens = DocumentTokenizer(str(folder / "tokens"), tokenizer_name_or_path=tokenizer, shuffle_documents=False)
        counted = JsonlWriter(str(folder / "kept"), compression=None)
        _dedup(folder, 1, JsonlReader(str(folder / "clean")), [counted, tokens])
        return _lines(folder / "kept")


def _run(folder: Path, steps: list[PipelineStep], tasks: int = 1, workers: int = 1) -> None:
    logs = tempfile.mkdtemp(dir=folder)  # of each run its own: what they say is done is not done again
    LocalPipelineExecutor(steps, tasks, workers, logging_dir=logs, start_method="fork").run()


def _dedup(folder: Path, workers: int, reader: JsonlReader, after: list[PipelineStep]) -> None:
    """The four steps of its MinHash dedup; the last goes on into the steps after it."""
    signatures, buckets, remove = (str(folder / name) for name in ("signatures", "buckets", "remove"))
    _run(folder, [reader, MinhashDedupSignature(signatures, CONFIG)], workers, workers)
    _run(folder, [MinhashDedupBuckets(signatures, buckets, config=CONFIG)], CONFIG.num_buckets, workers)
    _run(folder, [MinhashDedupCluster(buckets, remove, config=CONFIG)])
    _run(folder, [reader, MinhashDedupFilter(remove), *after], workers, workers)


def _cut(file: Path, count: int, folder: Path, parts: int) -> None:
    folder.mkdir()
    with file.open("rb") as lines:
        for part in range(parts):
            share = count * (part + 1) // parts - count * part // parts
            with (folder / f"{part}.jsonl").open("wb") as out:
                out.writelines(itertools.islice(lines, share))


def _lines(folder: Path) -> int:
    return sum(len(file.read_bytes().splitlines()) for file in folder.iterdir())


def _said(reader: Any, row: dict[str, Any], path: str, place: int | str) -> dict[str, Any]:
    """A row of any of the formats as one text."""
    turns = row.get("messages") or row.get("conversations")
    if turns:
        parts = [turn.get("content") or turn.get("value") or "" for turn in turns]
    else:
        parts = [row.get(key) or "" for key in ("instruction", "input", "output", "prompt", "completion", "text")]
    return {"text": "\n".join(filter(None, map(_text, parts))), "id": f"{path}/{place}"}


def _text(part: Any) -> str:
    return part if isinstance(part, str) else json.dumps(part)


def _few_urls(document: Any) -> bool:
    return sum(map(len, URL.findall(document.text))) <= 0.5 * len(document.text)
