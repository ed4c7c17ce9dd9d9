"""The export to Megatron, read back by a small reader written from its layout."""

from __future__ import annotations

import struct
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from corpus import flat, megatron
from refit.errors import BadInput

NUMPY = {4: np.int32, 8: np.uint16}


def written(folder: Path, documents: list[list[int]], vocabulary_size: int) -> None:
    lengths = np.array([len(document) for document in documents], np.int64)
    tokens = np.array([token for document in documents for token in document], np.int64)
    kinds = np.where(lengths > 0, flat.TEXT, flat.REFUSED)
    with flat.Writer(folder, "documents", vocabulary="v", vocabulary_size=vocabulary_size) as writer:
        ids = np.zeros((len(documents), 16), np.uint8)
        writer.append(tokens, np.zeros(len(tokens), np.uint8), lengths, ids, kinds)


def read_back(prefix: Path) -> list[list[int]]:
    """Megatron's documents: each is the sequences from one document index to the next."""
    index = prefix.with_suffix(".idx").read_bytes()
    assert index[:9] == b"MMIDIDX\0\0"
    version, code, sequences, documents = struct.unpack_from("<QBQQ", index, 9)
    assert version == 1
    lengths = np.frombuffer(index, np.int32, sequences, 34)
    pointers = np.frombuffer(index, np.int64, sequences, 34 + 4 * sequences)
    edges = np.frombuffer(index, np.int64, documents, 34 + 12 * sequences)
    assert len(index) == 34 + 12 * sequences + 8 * documents
    data = prefix.with_suffix(".bin").read_bytes()
    parts = [
        np.frombuffer(data, NUMPY[code], int(length), int(pointer)).tolist()
        for length, pointer in zip(lengths, pointers, strict=True)
    ]
    assert edges[0] == 0
    return [[token for part in parts[first:last] for token in part] for first, last in pairwise(edges)]


@pytest.mark.parametrize(("size", "dtype"), [(1 << 16, "uint16"), (1 << 17, "int32")])
def test_megatron_reads_the_documents_that_were_written(tmp_path: Path, size: int, dtype: str) -> None:
    documents = [[1, 2, size - 1], [], [0], list(range(50)), []]
    written(tmp_path, documents, size)
    told = megatron.export(tmp_path, "documents", tmp_path / "out" / "mega")
    assert (told["documents"], told["refused"], told["tokens"], told["dtype"]) == (3, 2, 54, dtype)
    assert read_back(tmp_path / "out" / "mega") == [document for document in documents if document]


def test_pointers_go_on_rising_past_two_gigabytes() -> None:
    """Megatron-LM#1519: computed in int32 they turn negative there."""
    parts = list(megatron.index_parts(np.array([1 << 30, 1 << 30, 1 << 30, 5]), "uint16"))
    assert np.frombuffer(parts[2], "<i8").tolist() == [0, 1 << 31, 1 << 32, 3 << 31]


def test_weights_that_megatron_has_no_place_for_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, half in (("whole", 255), ("weighed", 128)):
        with flat.Writer(tmp_path, name, vocabulary="v", vocabulary_size=9) as writer:
            mask = np.array([0, half, half, 255])
            writer.append(np.arange(4), mask, np.array([4]), np.zeros((1, 16), np.uint8), np.zeros(1, np.uint8))
        megatron.export(tmp_path, name, tmp_path / name)
    (told,) = capsys.readouterr().err.splitlines()
    assert "weights_not_exported" in told
    assert " tokens=2 " in told
    assert read_back(tmp_path / "weighed") == read_back(tmp_path / "whole") == [[0, 1, 2, 3]]


def test_a_prefix_with_a_dot_keeps_it(tmp_path: Path) -> None:
    written(tmp_path, [[1]], 9)
    told = megatron.export(tmp_path, "documents", tmp_path / "v1.2")
    assert told["bin"].endswith("/v1.2.bin")


def test_a_set_of_nothing_cannot_be_exported(tmp_path: Path) -> None:
    written(tmp_path, [[]], 9)
    with pytest.raises(BadInput, match="holds no document"):
        megatron.export(tmp_path, "documents", tmp_path / "mega")


def test_an_id_that_int32_cannot_hold_is_refused(tmp_path: Path) -> None:
    written(tmp_path, [[1]], (1 << 31) + 1)
    with pytest.raises(BadInput, match="int32 ends at 2147483647"):
        megatron.export(tmp_path, "documents", tmp_path / "mega")
