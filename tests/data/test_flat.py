"""The flat token format: what was written is read, and what was not written whole is not read at all."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus import flat
from refit.errors import BadInput

Document = tuple[list[int], list[int], int]


def written(folder: Path, batches: list[list[Document]], vocabulary_size: int = 70000) -> flat.Header:
    """A set of documents (tokens, mask, kind); document n has n as the first byte of its id."""
    number = 0
    with flat.Writer(folder, "documents", vocabulary="abc", vocabulary_size=vocabulary_size) as writer:
        for batch in batches:
            ids = np.zeros((len(batch), 16), np.uint8)
            ids[:, 0] = np.arange(number, number + len(batch))
            number += len(batch)
            writer.append(
                np.array([token for tokens, _, _ in batch for token in tokens], np.int64),
                np.array([value for _, mask, _ in batch for value in mask], np.int64),
                np.array([len(tokens) for tokens, _, _ in batch], np.int64),
                ids,
                np.array([kind for _, _, kind in batch], np.uint8),
            )
    return writer.header


def documents(vocabulary_size: int) -> st.SearchStrategy[Document]:
    pairs = st.lists(st.tuples(st.integers(0, vocabulary_size - 1), st.integers(0, 255)), min_size=1, max_size=20)
    held = st.tuples(pairs, st.sampled_from([flat.CONVERSATION, flat.TEXT])).map(
        lambda found: ([token for token, _ in found[0]], [mask for _, mask in found[0]], found[1])
    )
    return st.one_of(held, st.just(([], [], flat.REFUSED)))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([2, 1 << 16, (1 << 16) + 1, 1 << 20]), st.data())
def test_every_document_reads_back_as_it_was_written(vocabulary_size: int, data: st.DataObject) -> None:
    batches = data.draw(st.lists(st.lists(documents(vocabulary_size), max_size=5), max_size=5))
    whole = [document for batch in batches for document in batch]
    with TemporaryDirectory() as folder:
        header = written(Path(folder), batches, vocabulary_size)
        read = flat.read(Path(folder), "documents")
        assert read.header == header
        assert header.documents == len(read) == len(whole)
        assert header.tokens == sum(len(tokens) for tokens, _, _ in whole)
        assert header.targets == sum(sum(map(bool, mask)) for _, mask, _ in whole)
        assert header.dtype == ("uint16" if vocabulary_size <= 1 << 16 else "uint32") == str(read.tokens.dtype)
        assert read.lengths().tolist() == [len(tokens) for tokens, _, _ in whole]
        for number, (tokens, mask, kind) in enumerate(whole):
            found = read.document(number)
            assert (found[0].tolist(), found[1].tolist()) == (tokens, mask)
            assert read.kinds[number] == kind
            assert read.ids[number, 0] == number


def test_a_set_of_nothing_reads_back_as_nothing(tmp_path: Path) -> None:
    written(tmp_path, [])
    read = flat.read(tmp_path, "documents")
    assert len(read) == read.header.tokens == 0
    with pytest.raises(IndexError):
        read.document(0)


def test_the_files_are_mapped_and_not_loaded(tmp_path: Path) -> None:
    written(tmp_path, [[([1, 2], [0, 1], 0)]])
    read = flat.read(tmp_path, "documents")
    assert all(isinstance(array, np.memmap) for array in (read.tokens, read.mask, read.offsets, read.ids, read.kinds))


@pytest.mark.parametrize("part", ["tokens", "mask", "offsets", "ids", "kinds"])
def test_a_cut_file_is_refused_by_name_and_bytes(tmp_path: Path, part: str) -> None:
    written(tmp_path, [[([1, 2], [0, 1], 0)]])
    path = tmp_path / f"documents.{part}.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(BadInput, match=rf"{part}\.bin: has {len(whole) - 1} bytes, the header says {len(whole)}"):
        flat.read(tmp_path, "documents")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    written(tmp_path, [[([1, 2], [0, 1], 0)]])
    (tmp_path / "documents.mask.bin").unlink()
    with pytest.raises(BadInput, match=r"mask\.bin: is missing"):
        flat.read(tmp_path, "documents")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"version": 1}, r"flat format 1, this code reads 2 and 3\. Write the tokens again"),
        ({"dtype": "object"}, "dtype 'object'"),
        ({"extra": 1}, "not a flat token set"),
    ],
)
def test_a_header_of_another_kind_is_refused(tmp_path: Path, change: dict[str, object], why: str) -> None:
    written(tmp_path, [[([1, 2], [0, 1], 0)]])
    path = tmp_path / "documents.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(BadInput, match=why):
        flat.read(tmp_path, "documents")


def test_offsets_that_fall_are_refused(tmp_path: Path) -> None:
    written(tmp_path, [[([1, 2], [0, 1], 0), ([3], [0], 1)]])
    np.array([0, 9, 3], "<u8").tofile(tmp_path / "documents.offsets.bin")
    with pytest.raises(BadInput, match=r"offsets\.bin: offsets do not rise"):
        flat.read(tmp_path, "documents")


KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from corpus import flat
one = np.ones(1, np.int64)
with flat.Writer(Path(sys.argv[1]), "documents", vocabulary="abc", vocabulary_size=9) as writer:
    writer.append(one, one, one, np.zeros((1, 16), np.uint8), one)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_writer_leaves_no_set_behind_not_even_the_one_before(tmp_path: Path) -> None:
    written(tmp_path, [[([1, 2], [0, 1], 0)]])
    assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)]).returncode == -signal.SIGKILL
    with pytest.raises(BadInput, match="not a flat token set"):
        flat.read(tmp_path, "documents")


@pytest.mark.parametrize(
    ("document", "why"),
    [
        (([9], [0], 0), "the vocabulary has 9"),
        (([-1], [0], 0), "the vocabulary has 9"),
        (([1], [256], 0), "it is 0 to 255"),
        (([1], [], 0), "a mask of 0"),
        (([1], [0], 2), "no tokens where it is refused"),
        (([], [], 1), "no tokens where it is refused"),
        (([1], [0], 3), "kinds \\[3\\]"),
    ],
)
def test_a_batch_that_contradicts_itself_is_not_written(tmp_path: Path, document: Document, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        written(tmp_path, [[document]], vocabulary_size=9)
    assert not (tmp_path / "documents.json").exists()
