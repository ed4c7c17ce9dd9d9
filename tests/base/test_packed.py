"""The packed format: what is written is mapped back, and damage is refused."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest

from refit import packed
from refit.errors import BadInput


def written(folder: Path, vocabulary_size: int = 70000) -> packed.Header:
    tokens = np.array([[5, 6, 7, 65999, 9, 0], [1, 2, 3, 4, 5, 6]])
    segments = np.array([[1, 1, 2, 2, 2, 0], [1, 1, 1, 2, 2, 3]])
    mask = np.array([[0, 255, 0, 255, 1, 0], [0, 128, 255, 0, 255, 0]])
    return packed.write(
        folder, "train", tokens=tokens, segments=segments, mask=mask,
        vocabulary="v", vocabulary_size=vocabulary_size, samples=5,
    )  # fmt: skip


def test_a_split_comes_back(tmp_path: Path) -> None:
    header = written(tmp_path)
    read = packed.read(tmp_path, "train")
    assert read.header == header
    assert (header.dtype, header.tokens, header.targets, header.samples) == ("uint32", 11, 6, 5)
    assert read.tokens[0].tolist() == [5, 6, 7, 65999, 9, 0]
    assert read.mask.dtype == np.uint8
    assert read.mask.tolist() == [[0, 255, 0, 255, 1, 0], [0, 128, 255, 0, 255, 0]]


def test_a_weight_is_kept_in_255ths_and_none_above_0_becomes_0() -> None:
    weights = np.array([0.0, 1e-9, 0.001, 0.1, 0.5, 0.999, 1.0])
    assert packed.mask_of(weights).tolist() == [0, 1, 1, 26, 128, 255, 255]


def test_positions_start_anew_in_each_document(tmp_path: Path) -> None:
    written(tmp_path)
    positions = packed.position_ids(packed.read(tmp_path, "train").segments)
    assert positions.tolist() == [[0, 1, 0, 1, 2, 0], [0, 1, 2, 0, 1, 0]]


@pytest.mark.parametrize("name", ["train.tokens.bin", "train.segments.bin", "train.mask.bin"])
def test_a_file_cut_short_is_refused(tmp_path: Path, name: str) -> None:
    written(tmp_path)
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[:-1])
    with pytest.raises(BadInput, match="the header says"):
        packed.read(tmp_path, "train")


def test_another_version_or_no_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="not a packed split"):
        packed.read(tmp_path, "train")
    written(tmp_path)
    text = (tmp_path / "train.json").read_text().replace('"version": 2', '"version": 1')  # its mask was 0 or 1
    (tmp_path / "train.json").write_text(text)
    with pytest.raises(BadInput, match=r"packed format 1, this code reads 2 and 3\. Prepare the data again"):
        packed.read(tmp_path, "train")


def test_a_split_that_the_disk_has_no_room_for_is_an_error_before_anything_is_filled_in(tmp_path: Path) -> None:
    """Written into a map, a full disk would be a SIGBUS that no handler of ours sees."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            packed.create(tmp_path, "train", 1 << 10, 1 << 10, vocabulary="v", vocabulary_size=9)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_what_was_created_and_never_finished_is_no_split(tmp_path: Path) -> None:
    written(tmp_path)
    packed.create(tmp_path, "train", 2, 6, vocabulary="v", vocabulary_size=70000).tokens[:] = 1
    with pytest.raises(BadInput, match="not a packed split"):
        packed.read(tmp_path, "train")
