"""What the scanner takes from jsonl is what a JSON reader finds; a line that is odd is left to one."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus import dedup_files, jsonl, readers, shelf
from corpus.quarantine import Quarantine

Rows = list[tuple[str, str]]
Bad = list[tuple[int, str, str]]


class Aside:
    """What was set aside: line, reason and sample, as a quarantine is told."""

    def __init__(self) -> None:
        self.bad: Bad = []

    def add(self, source: str, file: str, line: int, reason: str, sample: Any) -> None:
        self.bad.append((line, reason, repr(sample)))


def taken(path: Path) -> tuple[Rows, Bad]:
    """A file's rows by way of a shelf, and what was set aside."""
    aside = Aside()
    with shelf.Shelf(path.parent / "aside") as found:
        dedup_files._add(path, found, cast(Quarantine, aside))
        rows = [
            row
            for block in found.blocks
            for row in zip(block.ids.to_pylist(), found.texts(block).to_pylist(), strict=True)
        ]
    return rows, aside.bad


def read(path: Path) -> tuple[Rows, Bad]:
    """The same, a line at a time by a JSON reader."""
    rows: Rows = []
    aside = Aside()
    for line, row in readers.read(path, path.name):
        if fault := dedup_files._fault(row):
            aside.add("", "", line, fault, row.sample if isinstance(row, readers.Fault) else row)
        else:
            rows.append((str(row["id"]), row["text"]))
    return rows, aside.bad


def scanned(line: bytes) -> tuple[Any, Any] | None:
    """What the scanner takes of one line; nothing where it leaves it to the reader."""
    data = np.frombuffer(line, np.uint8)
    found = jsonl.scan(data, 0, len(data))
    if not len(found.ids):
        assert len(found.odd) == 1
        return None
    out = np.zeros(found.size[0], np.uint8)
    offsets = np.array([0, len(out)])
    jsonl.take(data, data[:0], found.start, found.width, found.size, np.zeros(1, np.int64), offsets, out)
    return found.ids[0].as_py(), out.tobytes().decode()


strings = st.text(
    st.one_of(st.sampled_from('ab "\\/\n\t\x00\x1f\x7f\u2028é…退\ufeff\ud83d\ude00😀'), st.characters()), max_size=30
)
keys = st.one_of(st.sampled_from(["id", "text", "i", "tex", "texts", "é", "", "a\\b"]), strings)
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), strings)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=3)),
    max_leaves=6,
)
ids = st.one_of(strings, st.integers(), st.just(-0.0), values)


@st.composite
def objects(draw: st.DrawFn) -> bytes:
    """An object written in one of many ways; keys may occur twice."""
    fields = [("id", draw(ids)), ("text", draw(st.one_of(strings, strings, values)))]
    fields += draw(st.lists(st.tuples(keys, values), max_size=3))
    blank = draw(st.sampled_from(["", " ", "\t", " \r"]))
    ascii_only = draw(st.booleans())
    told = [
        f"{json.dumps(key, ensure_ascii=ascii_only)}{blank}:{blank}"
        + json.dumps(value, ensure_ascii=ascii_only, separators=(f"{blank},", f":{blank}"))
        for key, value in draw(st.permutations(fields))
    ]
    return f"{blank}{{{blank}{f'{blank},{blank}'.join(told)}{blank}}}{blank}".encode("utf-8", "surrogatepass")


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """An object with some bytes too many, too few, or others."""
    line = draw(objects())
    at = draw(st.integers(0, len(line)))
    put = draw(
        st.one_of(
            st.sampled_from([b"", b'"', b"\\", b",", b"}", b"]", b"1", b"\xff", b"\xed\xa0\x80"]), st.binary(max_size=2)
        )
    )
    return (line[:at] + put + line[at + draw(st.integers(0, 2)) :]).replace(b"\n", b"")


blanks = st.sampled_from([b"", b" ", b"\t\r", b"\x0c", "\u00a0".encode()])
lines = st.lists(st.one_of(objects(), objects(), objects(), damaged(), blanks, st.just(b"!unusable why")), max_size=8)


@settings(max_examples=100, deadline=None)
@given(
    lines=lines, feed=st.sampled_from([b"\n", b"\n", b"\r\n"]), last=st.booleans(), mark=st.booleans(),
    block=st.sampled_from([1, 64, 300, 8 << 20]),
)  # fmt: skip
def test_rows_and_faults_are_those_of_a_json_reader(
    lines: list[bytes], feed: bytes, last: bool, mark: bool, block: int
) -> None:
    with TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(shelf, "BLOCK_BYTES", block)
        path = Path(name, "in.jsonl")
        path.write_bytes(b"\xef\xbb\xbf" * mark + feed.join(lines) + feed * last)
        assert taken(path) == read(path)


@pytest.mark.parametrize(
    "line",
    [
        {"id": "a", "text": 'quotes " and \\ and / and\nlines\tand \x00\x1f\x7f'},
        {"id": 7, "text": "é … 退款 😀 \u2028 \U00010000 \uffff"},
        {"text": "", "id": "", "more": {"a": [1, -2.5e-3, True, None, {"a": []}], "b": {}}, "less": "\ud83d\ude00"},
    ],
)
@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_what_is_common_is_taken(line: dict[str, Any], ascii_only: bool, end: bytes) -> None:
    told = json.dumps(line, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    if b"\xed\xa0" not in told:
        assert scanned(told + end) == (str(line["id"]), line["text"])


ODD = rb"""
    "a": 1, "a": 1 | "a": 01 | "a": +1 | "a": 1. | "a": .5 | "a": 1e | "a": NaN | "a": - | "a": nul | "a": truee
    "a": [} | "a": [1,] | "a": {"b":1,} | "a": {"b":1,"b":2} | "a" | "a" 1 | 1: 2 | "a": "\x"
    "\u0061": 1 | "a": "\ud800" | "a": "\udc00\ud800" | "a": "\u12g4" | "id": "b" | "text": "t"
    "a": [[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]
"""


@pytest.mark.parametrize("rest", [rest.strip() for rest in ODD.strip().replace(b"\n", b"|").split(b"|")])
def test_what_is_odd_is_left(rest: bytes) -> None:
    assert scanned(b'{"id": "a", "text": "t", "x": 1}') == ("a", "t")
    assert scanned(b'{"id": "a", "text": "t", ' + rest + b"}") is None


@pytest.mark.parametrize(
    "inside",
    [
        b"\x1f", b"\x80", b"\xe9", b"\xc0\xaf", b"\xe0\x9f\xbf", b"\xed\xa0\x80", b"\xf0\x8f\x80\x80",
        b"\xf4\x90\x80\x80", b"\xf5\x80\x80\x80", b"\xe2\x82", b"\xe2\x82x",
    ],
)  # fmt: skip
def test_a_string_that_is_no_utf_8_is_left(inside: bytes) -> None:
    for before in (b"", b"1234567", "退款退款".encode()):
        assert scanned(b'{"id": "a", "text": "' + before + inside + b'"}') is None
        assert scanned(b'{"id": "a", "text": "' + before + inside + b'12345678"}') is None


@pytest.mark.parametrize("id", [b"1.0", b"-0", b"1e3", b"null", b"true", b'"\\n"', b'["a"]', b"{}", b"1" * 90])
def test_an_id_that_is_no_plain_name_is_left(id: bytes) -> None:
    assert scanned(b'{"id": ' + id + b', "text": ""}') is None


@pytest.mark.parametrize(
    "line", [b'{"id": "a"}', b'{"text": "a"}', b'{"id": "a", "text": 1}', b"[]", b'"a"', b"{", b"{}"]
)
@pytest.mark.parametrize("end", [b"", b" x", b"{"])
def test_a_line_without_an_id_and_a_text_is_left(line: bytes, end: bytes) -> None:
    assert scanned(line + end) is None


def test_a_line_that_breaks_off_is_left() -> None:
    line = rb'{"id": "a", "text": "\ud83d\ude00 \n", "more": [1.5e-3, {"a": true}]}'
    assert scanned(line) == ("a", "😀 \n")
    assert [scanned(line[:stop]) for stop in range(1, len(line))] == [None] * (len(line) - 1)


def test_a_line_that_is_too_long_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    with path.open("wb") as handle:
        for size in (readers.MAX_LINE - 1, readers.MAX_LINE, 100):
            head = b'{"id": "%d", "text": "' % size
            handle.write(head + b"x" * (size - len(head) - 2) + b'"}\n')
    rows, bad = taken(path)
    assert (rows, bad) == read(path)
    assert [line for line, *_ in bad] == [2]


def test_a_disk_that_fails_while_a_file_is_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = threading.Event()

    def fail(descriptor: int) -> None:
        tried.set()
        raise OSError(errno.EIO, "the disk is broken")

    monkeypatch.setattr("corpus.dedup_files.SYNC_SECONDS", 0)
    monkeypatch.setattr("os.fdatasync", fail)
    (tmp_path / "draft").touch()
    with pytest.raises(OSError, match="broken"), dedup_files._synced(tmp_path / "draft"):
        assert tried.wait(60)


def test_a_shelf_gives_some_rows_of_any_block(tmp_path: Path) -> None:
    def rows() -> Iterator[tuple[str, str]]:
        yield from ((f"{number}", "é" * (number % 50)) for number in range(20_000))

    with shelf.Shelf(tmp_path / "aside") as found:
        found.add_rows(rows())
        wanted = np.array([3, 8191, 8192, 19_999])
        texts = [text for block, own in found.picked(wanted) for text in found.texts(block, own).to_pylist()]
    assert texts == ["é" * int(number % 50) for number in wanted]
    assert len(found.blocks) == 3


def test_an_id_that_is_no_unicode_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"id": "\\ud800", "text": "a"}\n{"id": "b", "text": "b"}\n')
    rows, bad = taken(path)
    assert rows == [("b", "b")]
    assert [(line, reason) for line, reason, _ in bad] == [(1, "half a surrogate pair: the id is no Unicode")]
