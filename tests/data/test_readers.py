"""Files as they come: what can be read is read, what cannot says why and stops nothing."""

from __future__ import annotations

import bz2
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from corpus import readers
from corpus.readers import Fault


def zstd(data: bytes) -> bytes:
    return bytes(pa.compress(data, "zstd", asbytes=True))


def read(tmp_path: Path, name: str, content: bytes | str) -> list[tuple[int, Any]]:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return list(readers.read(path, name))


def faults(rows: list[tuple[int, Any]]) -> list[tuple[int, str]]:
    return [(line, row.reason) for line, row in rows if isinstance(row, Fault)]


def good(rows: list[tuple[int, Any]]) -> list[tuple[int, Any]]:
    return [(line, row) for line, row in rows if not isinstance(row, Fault)]


def test_bad_lines_stand_between_good_ones_and_blank_ones_are_passed_over(tmp_path: Path) -> None:
    rows = read(tmp_path, "x.jsonl", '{"a": 1}\n\n{"a": \n{"a": 2}\r\n{"a": 3')
    assert good(rows) == [(1, {"a": 1}), (4, {"a": 2})]
    assert [(line, why.partition(":")[0]) for line, why in faults(rows)] == [(3, "not JSON"), (5, "not JSON")]


def test_a_line_separator_inside_a_string_is_one_record(tmp_path: Path) -> None:
    """claude-code-log#139: U+2028 and U+0085 are no ends of a line in JSON."""
    assert good(read(tmp_path, "x.jsonl", '{"a": "b\u2028c\u0085d"}\n')) == [(1, {"a": "b\u2028c\u0085d"})]


def test_nan_is_not_json(tmp_path: Path) -> None:
    assert faults(read(tmp_path, "x.jsonl", '{"a": NaN}\n')) == [(1, "not JSON: NaN")]


def test_a_key_twice_with_differing_values_is_refused_and_with_one_value_is_not(tmp_path: Path) -> None:
    rows = read(tmp_path, "x.jsonl", '{"a": 1, "a": 2}\n{"a": 1, "a": 1}\n')
    assert faults(rows) == [(1, "a key occurs twice with differing values: a")]
    assert good(rows) == [(2, {"a": 1})]


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    assert good(read(tmp_path, "x.jsonl", b'\xef\xbb\xbf{"a": 1}\n')) == [(1, {"a": 1})]
    assert good(read(tmp_path, "x.csv", b"\xef\xbb\xbfa,b\n1,2\n")) == [(2, {"a": "1", "b": "2"})]


def test_utf_16_with_its_mark_is_read(tmp_path: Path) -> None:
    assert good(read(tmp_path, "x.jsonl", '{"a": "é"}\n{"a": "ü"}\n'.encode("utf-16"))) == [
        (1, {"a": "é"}),
        (2, {"a": "ü"}),
    ]


def test_a_line_in_another_encoding_than_the_others_is_a_fault(tmp_path: Path) -> None:
    rows = read(tmp_path, "x.jsonl", '{"a": "ééééé"}\n'.encode() + '{"a": "é"}\n'.encode("latin-1") + b'{"a": 1}\n')
    assert faults(rows)[0][1].startswith("not UTF-8")
    assert good(rows) == [(1, {"a": "ééééé"}), (3, {"a": 1})]


def test_a_line_without_end_is_read_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "MAX_LINE", 1 << 20)
    rows = read(tmp_path, "x.jsonl", b'{"a": "' + b"x" * (3 << 20) + b'"}\n{"a": 1}\n')
    assert faults(rows) == [(1, "a line of more than 1 MiB")]
    assert good(rows) == [(2, {"a": 1})]


def test_gzip_members_are_one_file_and_a_cut_one_gives_what_it_has(tmp_path: Path) -> None:
    two = gzip.compress(b'{"a": 1}\n') + gzip.compress(b'{"a": 2}\n')
    assert good(read(tmp_path, "x.jsonl.gz", two)) == [(1, {"a": 1}), (2, {"a": 2})]
    cut = read(tmp_path, "x.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 3)[:-8])
    assert len(good(cut)) == 3
    assert "gzip file breaks off" in faults(cut)[0][1]


def test_gzip_is_told_by_content_also_where_the_name_does_not_say_so(tmp_path: Path) -> None:
    assert good(read(tmp_path, "x.jsonl", gzip.compress(b'{"a": 1}\n'))) == [(1, {"a": 1})]


def test_a_json_array_keeps_what_stands_before_the_break(tmp_path: Path) -> None:
    text = json.dumps([{"a": 1}, {"a": 2}], indent=1)
    assert good(read(tmp_path, "x.json", text)) == [(2, {"a": 1}), (5, {"a": 2})]
    cut = read(tmp_path, "x.json", text[:-12])
    assert good(cut) == [(2, {"a": 1})]
    assert "JSON array breaks off" in faults(cut)[0][1]
    assert faults(read(tmp_path, "x.json", '[{"a": 1}')) == [(1, "the JSON array breaks off: it is never closed")]
    assert read(tmp_path, "x.json", "[]") == []


def test_a_json_file_may_hold_lines(tmp_path: Path) -> None:
    assert good(read(tmp_path, "x.json", '{"a": 1}\n{"a": 2}\n')) == [(1, {"a": 1}), (2, {"a": 2})]


def test_csv_rows_are_where_they_begin_and_short_ones_are_faults(tmp_path: Path) -> None:
    rows = read(tmp_path, "x.csv", 'a,b\n"one\ntwo",2\nonly\n3,4\n')
    assert good(rows) == [(2, {"a": "one\ntwo", "b": "2"}), (5, {"a": "3", "b": "4"})]
    assert faults(rows) == [(4, "wrong number of columns: 1, the header has 2")]
    assert good(read(tmp_path, "x.tsv", "a\tb\n1\t2\n")) == [(2, {"a": "1", "b": "2"})]


def test_csv_line_that_is_not_utf_8_is_a_fault(tmp_path: Path) -> None:
    rows = read(tmp_path, "x.csv", b"a,b\n\xff,1\n" + "2,ééééé\n".encode())
    assert good(rows) == [(3, {"a": "2", "b": "ééééé"})]
    assert faults(rows)[0][0] == 2


def test_parquet_columns_of_any_type_are_read(tmp_path: Path) -> None:
    table = pa.table({"text": pa.array(["a", "b", "a"]).dictionary_encode(), "n": pa.array([None, None, 1])})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=1)
    rows = list(readers.read(tmp_path / "x.parquet", "x.parquet"))
    assert rows == [(1, {"text": "a", "n": None}), (2, {"text": "b", "n": None}), (3, {"text": "a", "n": 1})]


def test_a_column_that_begins_with_nothing_but_nulls_is_read(tmp_path: Path) -> None:
    """datasets#8241: a type guessed from a first chunk of nulls must not decide for the strings after it."""
    table = pa.table({"text": pa.array([None] * 300 + ["late"], pa.string())})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=100)
    rows = [row["text"] for _, row in readers.read(tmp_path / "x.parquet", "x.parquet")]
    assert rows == [None] * 300 + ["late"]


def test_a_column_of_more_than_two_gigabytes_is_read_a_little_at_a_time(tmp_path: Path) -> None:
    """datasets#7222: what does not fit into 32-bit offsets; here one text of a megabyte, 2,200 times."""
    text = pa.DictionaryArray.from_arrays(pa.array([0] * 2200, pa.int32()), pa.array(["x" * (1 << 20)]))
    pq.write_table(pa.table({"text": text}), tmp_path / "x.parquet", store_schema=False)
    assert (tmp_path / "x.parquet").stat().st_size < 3 << 20
    before = pa.total_allocated_bytes()
    most = last = 0
    for line, row in readers.read(tmp_path / "x.parquet", "x.parquet"):
        assert len(row["text"]) == 1 << 20
        most, last = max(most, pa.total_allocated_bytes() - before), line
    assert last == 2200
    assert most < 1 << 30


def test_a_broken_parquet_file_says_so(tmp_path: Path) -> None:
    assert "parquet" in faults(read(tmp_path, "x.parquet", b"PAR1" + b"\x00" * 50))[0][1]


def test_binary_is_called_binary_once(tmp_path: Path) -> None:
    rows = read(tmp_path, "x.jsonl", bytes(range(256)) * 100)
    assert faults(rows) == [(1, "binary: neither text nor parquet")]


def test_plain_text_is_a_document_a_line(tmp_path: Path) -> None:
    assert [row.strip() for _, row in read(tmp_path, "x.txt", "one\n\ntwo\n")] == ["one", "two"]


def test_nesting_without_end_is_a_fault(tmp_path: Path) -> None:
    assert len(faults(read(tmp_path, "x.jsonl", "[" * 100 + '{"a":' * 100_000 + "\n"))) == 1


LANGUAGES = {
    "gb18030": "退款什么时候到账？我已经等了三个星期了，客服一直没有回复。",
    "big5": "退款什麼時候到帳？我已經等了三個星期了，客服一直沒有回覆。",
    "shift_jis": "返金はいつ届きますか？三週間待っていますが、返事がありません。",
    "euc_kr": "환불은 언제 되나요? 3주 동안 기다렸는데 고객센터에서 답변이 없습니다.",
    "cp1251": "Где мой заказ? Я жду уже три недели, и никто не отвечает на мои письма.",
    "cp1252": "Où est ma commande ? Je n’ai rien reçu depuis trois semaines, c’est très décevant.",
    "utf-16-le": "退款什么时候到账？ Où est ma commande ?",
    "utf-16": "退款什么时候到账？ Où est ma commande ?",
    "utf-32": "退款什么时候到账？",
}


@pytest.mark.parametrize("encoding", LANGUAGES)
@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv"])
def test_an_encoding_is_found_at_the_door(tmp_path: Path, encoding: str, name: str) -> None:
    said = LANGUAGES[encoding]
    rows = [{"text": said, "n": str(n)} for n in range(3)]
    texts = {
        "x.jsonl": "".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in rows),
        "x.json": json.dumps(rows, ensure_ascii=False),
        "x.csv": "text,n\n" + "".join(f'"{row["text"]}",{row["n"]}\n' for row in rows),
    }
    found = read(tmp_path, name, texts[name].encode(encoding))
    assert [row for _, row in found] == rows


def test_one_wrong_byte_makes_no_other_encoding(tmp_path: Path) -> None:
    line = json.dumps({"text": LANGUAGES["gb18030"]}, ensure_ascii=False).encode() + b"\n"
    rows = read(tmp_path, "x.jsonl", line * 5 + b'{"text": "caf\xe9"}\n' + line)
    assert [number for number, _ in good(rows)] == [1, 2, 3, 4, 5, 7]
    assert faults(rows) == [(6, "not UTF-8: invalid continuation byte at byte 13")]


@pytest.mark.parametrize(("ending", "pack"), [(".bz2", bz2.compress), (".zst", zstd), (".gz", gzip.compress)])
def test_packed_files_in_several_members_are_read_and_cut_ones_told(tmp_path: Path, ending: str, pack: Any) -> None:
    lines = [json.dumps({"n": n, "text": f"{n} {n * n} " * 30}).encode() + b"\n" for n in range(2000)]
    whole = pack(b"".join(lines[:1200])) + pack(b"".join(lines[1200:]))
    assert [row["n"] for _, row in read(tmp_path, f"x.jsonl{ending}", whole)] == list(range(2000))
    rows = read(tmp_path, f"x.jsonl{ending}", whole[:-20])
    assert "breaks off" in faults(rows)[-1][1]
    assert len(good(rows)) >= 1000 or ending != ".gz"


def test_arrow_files_are_read(tmp_path: Path) -> None:
    table = pa.table({"text": ["a", "b"], "kind": pa.array(["x", "y"]).dictionary_encode()})
    path = tmp_path / "x.arrow"
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)
    assert list(readers.read(path, "x.arrow")) == [(1, {"text": "a", "kind": "x"}), (2, {"text": "b", "kind": "y"})]
