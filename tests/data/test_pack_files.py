"""`corpus pack` and `corpus export`: plain files in, tokens and packs out, and every row accounted for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.parquet as pq
import pytest

from corpus import flat
from corpus.tokens import Encoder
from refit import packed
from refit.fingerprint import file_digest
from refit.manifest import damage

if TYPE_CHECKING:
    from tests.data.conftest import Line


@pytest.fixture
def delivery(line: Line) -> list[str]:
    """Conversations (one far too long, one without an answer, one broken) and plain texts (one far too long)."""
    talks = [{"instruction": f"where is lamp {n}", "input": "", "output": "late"} for n in range(20)]
    talks += [{"instruction": "why", "input": "", "output": "late " * 100}, {"instruction": "x", "output": ""}]
    texts = [{"text": f"red lamp {n}"} for n in range(5)] + [{"text": "blue chair " * 100}]
    mixed = line.folder / "mixed.jsonl"
    mixed.write_text("".join(json.dumps(row) + "\n" for row in talks) + "{broken\n")
    plain = line.folder / "plain.jsonl"
    plain.write_text("".join(json.dumps(row) + "\n" for row in texts))
    return [str(mixed), str(plain)]


def pack(line: Line, delivery: list[str], tokenizer: Path | str, *more: str) -> tuple[int, dict[str, object]]:
    output = line.folder / "out"
    return line.corpus(
        "pack", *delivery, "--tokenizer", str(tokenizer), "--output", str(output), "--length", "64", *more
    )


def test_every_row_is_packed_or_in_quarantine(line: Line, delivery: list[str], tokenizer: Path) -> None:
    code, answer = pack(line, delivery, tokenizer)
    assert code == 0, answer
    folder = line.folder / "out"
    documents, train = flat.read(folder, "documents"), packed.read(folder, "train")
    assert answer["refused"] == {
        "the answer is empty": 1, "not JSON": 1, "a conversation longer than a pack": 1,
    }  # fmt: skip
    bad = pq.read_table(folder / "quarantine.parquet").to_pylist()
    assert sorted((row["file"], row["line"]) for row in bad) == [("mixed.jsonl", n) for n in (21, 22, 23)]
    assert next(row["sample"] for row in bad if row["line"] == 21).startswith("late late")
    assert (answer["records"], answer["documents"], answer["split"]) == (27, 26, 1)
    too_long = int(documents.lengths()[20])
    assert train.header.tokens == documents.header.tokens - too_long == answer["tokens"]
    assert documents.header.vocabulary == train.header.vocabulary == file_digest(tokenizer / "tokenizer.json")
    manifest = line.manifest(folder)
    assert damage(folder, manifest) == []
    assert manifest.facts["packs"] == train.header.packs == answer["packs"]


def test_documents_are_the_encoders_rows_in_the_order_of_the_files(
    line: Line, delivery: list[str], tokenizer: Path
) -> None:
    pack(line, delivery, tokenizer)
    documents = flat.read(line.folder / "out", "documents")
    talk = [{"role": "user", "content": "where is lamp 3"}, {"role": "assistant", "content": "late"}]
    text = [{"role": "text", "content": "red lamp 0"}]
    for number, row in zip((3, 21), Encoder(tokenizer).rows([talk, text]), strict=True):
        assert not isinstance(row, str)
        tokens, mask = documents.document(number)
        assert (tokens.tolist(), mask.tolist()) == (row.ids.tolist(), row.mask.tolist())
    assert documents.kinds.tolist() == [flat.CONVERSATION] * 21 + [flat.TEXT] * 6


def test_a_record_that_teaches_nothing_keeps_its_number_and_has_no_tokens(line: Line, tokenizer: Path) -> None:
    path = line.folder / "marks.jsonl"
    refused = [{"role": "user", "content": "\ue0000\ue001", "name": "x"}, {"role": "assistant", "content": "b"}]
    rows = [{"prompt": "a", "completion": "b"}, {"messages": refused}]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[0]]))
    code, answer = pack(line, [str(path)], tokenizer)
    documents = flat.read(line.folder / "out", "documents")
    assert (code, answer["records"], answer["documents"], answer["quarantined"]) == (0, 3, 2, 1)
    assert documents.kinds.tolist() == [0, flat.REFUSED, 0]
    assert (documents.ids[0] == documents.ids[2]).all()
    assert (documents.ids[0] != documents.ids[1]).any()


def test_overflow_follows_what_is_asked_and_is_counted(line: Line, delivery: list[str], tokenizer: Path) -> None:
    code, answer = pack(line, delivery, tokenizer, "--overflow", "truncate", "--overflow-text", "drop")
    assert code == 0, answer
    documents = flat.read(line.folder / "out", "documents")
    cut, dropped = int(documents.lengths()[20]) - 64, int(documents.lengths()[26])
    assert answer["truncated"] == {"documents": 1, "tokens": cut}
    assert answer["dropped"] == {"documents": 1, "tokens": dropped}
    assert answer["refused"]["a text longer than a pack"] == 1  # type: ignore[index]
    assert answer["tokens"] == documents.header.tokens - cut - dropped


def test_the_same_files_give_the_same_bytes_and_another_seed_another_order(
    line: Line, delivery: list[str], tokenizer: Path
) -> None:
    found = []
    for number, seed in enumerate(("1", "1", "2")):
        pack(line, delivery, tokenizer, "--seed", seed)
        folder = (line.folder / "out").rename(line.folder / f"out{number}")
        found.append(
            (line.manifest(folder).fingerprint, {file.path: file.sha256 for file in line.manifest(folder).files})
        )
    assert found[0] == found[1]
    assert found[0][0] != found[2][0]
    assert {name for name, digest in found[0][1].items() if digest != found[2][1][name]} == {
        f"train.{part}.bin" for part in ("tokens", "segments", "mask")
    }


def test_the_tokenizer_may_be_a_model_of_the_store(line: Line, delivery: list[str]) -> None:
    code, answer = pack(line, delivery, line.spec["train"]["base"])
    assert code == 0, answer


def test_a_folder_with_something_in_it_is_not_touched(line: Line, delivery: list[str], tokenizer: Path) -> None:
    kept = line.folder / "out" / "letters.txt"
    kept.parent.mkdir()
    kept.write_text("mine")
    code, answer = pack(line, delivery, tokenizer)
    assert (code, answer["error"]) == (10, "BadInput")
    assert "something is there already" in str(answer["message"])
    assert kept.read_text() == "mine"


def test_nothing_is_left_behind_where_no_record_is_left(line: Line, tokenizer: Path) -> None:
    path = line.folder / "empty.jsonl"
    path.write_text('{"instruction": "x", "output": ""}\n')
    code, answer = pack(line, [str(path)], tokenizer)
    assert (code, answer["error"]) == (10, "BadRecords")
    assert "the answer is empty" in str(answer["message"])
    assert not (line.folder / "out").exists()


@pytest.mark.parametrize(
    ("more", "why"), [(["--length", "4"], "--length is 4"), (["--length", "many"], "--length is many")]
)
def test_a_length_out_of_bounds_is_named(
    line: Line, delivery: list[str], tokenizer: Path, more: list[str], why: str
) -> None:
    code, answer = pack(line, delivery, tokenizer, *more)
    assert code == 10
    assert why in str(answer["message"])


def test_a_folder_without_a_tokenizer_is_named(line: Line, delivery: list[str]) -> None:
    code, answer = pack(line, delivery, line.folder)
    assert code == 10
    assert "no tokenizer.json there" in str(answer["message"])


def test_what_was_packed_is_exported_for_megatron(line: Line, delivery: list[str], tokenizer: Path) -> None:
    pack(line, delivery, tokenizer)
    documents = flat.read(line.folder / "out", "documents")
    code, answer = line.corpus("export", str(line.folder / "out"), "--megatron", str(line.folder / "mega" / "corpus"))
    assert (code, answer["documents"], answer["tokens"]) == (0, len(documents), documents.header.tokens)
    assert (np.fromfile(str(answer["bin"]), "<u2") == documents.tokens).all()
