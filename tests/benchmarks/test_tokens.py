"""Tokenize, mask and pack, beside Hugging Face's tokenizers with TRL's packing, in one run.

REFIT_BENCH_CONVERSATIONS conversations of about 1 KB, a question and an answer each. Both sides start from them in
memory; TRL ends with packs in memory, ours with packs on the disk, and each of our runs loads and checks its tokenizer
anew. TRL gets 10,000 of them, in one process (its default) and in two, and counts with the better speed.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from corpus import flat
from corpus.packing import pack_documents
from corpus.tokenize import write
from corpus.tokens import Encoder
from tests.benchmarks.documents import documents, english
from tests.benchmarks.table import note, rate
from tests.data.conftest import CHATML

pytestmark = pytest.mark.benchmark

ROOT = Path(__file__).parents[2]
COUNT = int(os.environ.get("REFIT_BENCH_CONVERSATIONS") or 50_000)
THEIRS = 10_000
LENGTH = 2048
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
Talk = list[dict[str, str]]


@pytest.fixture(scope="module")
def talks() -> list[Talk]:
    made = []
    for text, _ in documents(COUNT, english()):
        seam = text.find(" ", len(text) // 2)
        made.append([{"role": "user", "content": text[:seam]}, {"role": "assistant", "content": text[seam + 1 :]}])
    return made


@pytest.fixture(scope="module")
def file(talks: list[Talk], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first of the conversations for TRL, beside a tokenizer trained on such texts."""
    path = tmp_path_factory.mktemp("bench") / "talks.jsonl"
    rows = ({"prompt": talk[:1], "completion": talk[1:]} for talk in talks[:THEIRS])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = path.parent / "tokenizer"
    folder.mkdir()
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=16_000, special_tokens=SPECIALS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    made.train_from_iterator((message["content"] for talk in talks[:3000] for message in talk), trainer)
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(CHATML)
    return path


def theirs(file: Path, tokens: int) -> float:
    """Conversations a second; 0 where there are no peers. They must find as many tokens in them as we do."""
    python = ROOT / ".venv-peers/bin/python"
    found = [0.0]
    for processes in (1, 2) if python.exists() else ():
        done = subprocess.run(
            [python, Path(__file__).parent / "peers_packing.py", file, str(THEIRS), str(LENGTH), str(processes)],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        answer = json.loads(done.stdout.splitlines()[-1])
        assert answer["tokens"] == tokens
        found.append(answer["documents"] / answer["seconds"])
    return max(found)


def test_tokenize_mask_and_pack(talks: list[Talk], file: Path) -> None:
    def ours() -> int:
        encoder = Encoder(file.parent / "tokenizer")
        with flat.Writer(file.parent, "talks", vocabulary="", vocabulary_size=encoder.size) as out:
            write(out, encoder, talks, [f"{number:032x}" for number in range(len(talks))])
        assert encoder.tokenized_by.startswith("gigatoken ")
        chosen = np.stack([np.zeros(len(talks), np.int64), np.arange(len(talks))], axis=1)
        packed = pack_documents(
            [flat.read(file.parent, "talks")], chosen, np.ones(len(talks), np.int64), length=LENGTH, pad=encoder.pad,
            seed=1, folder=file.parent, split="talks-packed", vocabulary="", vocabulary_size=encoder.size,
        )  # fmt: skip
        assert packed.header.samples == len(talks)
        return len(talks)

    first = Encoder(file.parent / "tokenizer").encode(talks[:THEIRS])
    speed, peer = rate(ours, 3), theirs(file, int(first.lengths.sum()))
    note(f"tokenize, mask and pack, {COUNT:,} conversations (TRL)", speed, peer or None)
    if not peer:
        print("\nno peers: `make bench-data` makes their venv")
    assert speed > peer
