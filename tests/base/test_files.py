"""Whole or not at all, also under kill -9 and two writers."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from refit import files

WRITER = """
import sys
from pathlib import Path

import pytest
from refit import files
path = Path(sys.argv[1])
for turn in range(10**6):
    files.write(path, str(turn % 10).encode() * 20000)
"""


def test_a_reader_never_sees_half_a_file_while_the_writer_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for _ in range(5):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
        deadline = time.monotonic() + 30
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        for _ in range(200):
            text = path.read_bytes()
            assert len(text) == 20000
            assert len(set(text)) == 1
        writer.kill()
        writer.wait()
        assert len(set(path.read_bytes())) == 1


def test_of_many_creators_exactly_one_wins(tmp_path: Path) -> None:
    path = tmp_path / "fence"
    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(lambda n: files.create(path, str(n).encode()), range(64)))
    assert won.count(True) == 1
    assert path.read_bytes() == str(won.index(True)).encode()
    assert [p.name for p in tmp_path.iterdir()] == ["fence"]


def test_append_closes_off_a_line_that_a_kill_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": 2, "b')
    files.append(path, b'{"a": 3}')
    assert path.read_bytes().splitlines() == [b'{"a": 1}', b'{"a": 2, "b', b'{"a": 3}']


def test_lines_go_on_after_one_that_a_full_disk_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    write = os.write
    with files.Lines(path) as lines:
        lines.append(b"1")
        monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]))
        lines.append(b"22222")
        monkeypatch.setattr(os, "write", write)
        lines.append(b"3\n")
    assert path.read_bytes() == b"1\n222\n3\n"


def test_a_folder_with_content_keeps_its_name(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text(name)
    assert files.rename_folder(tmp_path / "first", tmp_path / "final")
    assert not files.rename_folder(tmp_path / "second", tmp_path / "final")
    assert (tmp_path / "final" / "x").read_text() == "first"


def test_a_draft_replaces_its_file_at_the_end_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    with files.replacing(path) as draft:
        draft.write_text("first")
        assert not path.exists()
    assert path.read_text() == "first"

    def fail() -> None:
        with files.replacing(path) as draft:
            draft.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert path.read_text() == "first"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.parquet"]


def test_several_may_keep_one_folder_small_at_the_same_time(tmp_path: Path) -> None:
    """Two machines' processes, or two of one, that fetch versions of one object: what is gone already is no error."""
    together = Barrier(4, timeout=60)

    def keep(name: int) -> None:
        for turn in range(30):
            together.wait()
            for number in range(20):
                (tmp_path / f"{name}-{turn}-{number}").touch()
            files.keep_newest(tmp_path, 2)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(keep, range(4)))
    files.keep_newest(tmp_path, 2)
    assert len(list(tmp_path.iterdir())) == 2
