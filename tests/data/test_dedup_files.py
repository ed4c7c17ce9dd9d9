"""`corpus dedup`: plain files in, clusters out; the same whatever the order, and nothing lost on the way."""

from __future__ import annotations

import gzip
import json
import random
import unicodedata
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from corpus import cli

LONG = "the parcel that I ordered three weeks ago has still not come and nobody answers my letters about the money"


def rows(*texts: str) -> list[dict[str, str]]:
    return [{"id": f"d{number:03d}", "text": text} for number, text in enumerate(texts)]


class Dedup:
    """The command on files below a folder."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capsys = folder, capsys

    def write(self, content: list[Any] | bytes, name: str = "in.jsonl") -> Path:
        path = self.folder / name
        if isinstance(content, list):
            content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in content).encode()
        path.write_bytes(content)
        return path

    def run(self, *arguments: Path | str, code: int = 0) -> dict[str, Any]:
        self._capsys.readouterr()
        given = ["dedup", *map(str, arguments), "--output", str(self.folder / "out")]
        found = cli.main(given)
        answer: dict[str, Any] = json.loads(self._capsys.readouterr().out.splitlines()[-1])
        assert found == code, answer
        return answer

    def clusters(self) -> dict[str, str]:
        table = pq.read_table(self.folder / "out" / "clusters.parquet").to_pylist()
        return {row["id"]: row["cluster"] for row in table}

    def kept(self) -> dict[str, str]:
        table = pq.read_table(self.folder / "out" / "kept.parquet").to_pylist()
        return {row["id"]: row["text"] for row in table}

    def quarantined(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = pq.read_table(self.folder / "out" / "quarantine.parquet").to_pylist()
        return found


@pytest.fixture
def dedup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Dedup:
    return Dedup(tmp_path, capsys)


def test_a_cluster_is_named_by_its_lowest_id_which_stays(dedup: Dedup) -> None:
    texts = rows(LONG, LONG.upper() + "!", "something else entirely, about lamps and chairs", f"{LONG} back")
    answer = dedup.run(dedup.write(texts))
    assert dedup.clusters() == {"d000": "d000", "d001": "d000", "d002": "d002", "d003": "d000"}
    assert dedup.kept() == {"d000": LONG, "d002": texts[2]["text"]}
    counts = {name: answer[name] for name in ("documents", "kept", "clusters", "quarantined")}
    assert counts == {"documents": 4, "kept": 2, "clusters": 2, "quarantined": 0}
    assert answer["candidate_pairs"] >= answer["verified_pairs"] == 2
    assert answer["documents_per_second"] == pytest.approx(4 / answer["seconds"])
    assert answer["peak_memory_bytes"] > 0


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_neither_the_order_of_rows_nor_of_files_decides(dedup: Dedup, data: st.DataObject) -> None:
    words = LONG.split()
    variants = [LONG, " ".join(words[:-1]), " ".join(words[1:]), " ".join(words[::-1]), "short", "!!", "..."]
    given = rows(*data.draw(st.lists(st.sampled_from(variants), min_size=1, max_size=12)))
    dedup.run(dedup.write(given))
    first = dedup.clusters()
    mixed = data.draw(st.permutations(given))
    cut = data.draw(st.integers(0, len(mixed)))
    parts = [dedup.write(part, f"part-{n}.jsonl") for n, part in enumerate((mixed[:cut], mixed[cut:])) if part]
    dedup.run(*parts)
    assert dedup.clusters() == first


def test_line_ends_case_and_composition_make_no_other_text(dedup: Dedup) -> None:
    given = "Das Paket fu\u0308r Jose\u0301 ist\nnoch nicht da, und niemand antwortet auf E\u0301tienne"
    composed = unicodedata.normalize("NFC", given)
    dedup.run(dedup.write(rows(given, composed, composed.replace("\n", "\r\n"), composed.upper().replace("SS", "ß"))))
    assert set(dedup.clusters().values()) == {"d000"}


def test_texts_without_words_are_never_clustered(dedup: Dedup) -> None:
    dedup.run(dedup.write(rows("", "", "!!!", "!!!", "...")))
    assert len(set(dedup.clusters().values())) == 5


def test_what_cannot_be_read_is_set_aside_with_its_place(dedup: Dedup) -> None:
    good = json.dumps({"id": 7, "text": LONG}).encode()
    lines = [
        good, b"{broken", b"", b'{"id": "a"}', b'{"text": "no id"}', b'{"id": "b", "text": 3}',
        b'{"id": "c", "text": "\\udcb2"}', b'{"id": "e", "text": NaN}', b'{"id": "f", "text": "x", "text": "y"}',
        json.dumps({"id": "g", "text": "one\u2028record"}, ensure_ascii=False).encode(), b'{"id": "h", "te',
    ]  # fmt: skip
    answer = dedup.run(dedup.write(b"\n".join(lines)))
    assert dedup.kept() == {"7": LONG, "g": "one\u2028record"}
    assert [row["line"] for row in dedup.quarantined()] == [2, 4, 5, 6, 7, 8, 9, 11]
    assert answer["quarantined"] == 8


def test_numbers_as_ids_and_gzip(dedup: Dedup) -> None:
    data = "".join(json.dumps({"id": n, "text": f"{LONG} {n % 2}", "more": [n]}) + "\n" for n in range(4)).encode()
    dedup.run(dedup.write(gzip.compress(data[:90]) + gzip.compress(data[90:]), "in.jsonl.gz"))
    assert sorted(dedup.clusters()) == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no row can be read"),
        (b"garbage\n", "no row can be read. not JSON (1)"),
        (rows("a b") * 2, "'d000' occurs more"),
    ],
)
def test_input_that_cannot_work_is_told(dedup: Dedup, content: Any, words: str) -> None:
    assert words in dedup.run(dedup.write(content), code=10)["message"]
    assert not (dedup.folder / "out").exists()


def test_wrong_arguments_are_told(dedup: Dedup) -> None:
    assert "nowhere.jsonl: there is no such file" in dedup.run(dedup.folder / "nowhere.jsonl", code=10)["message"]
    path = dedup.write(rows(LONG))
    assert "--threshold" in dedup.run(path, "--threshold", "1.5", code=10)["message"]
    assert "--ngram" in dedup.run(path, "--ngram", "0", code=10)["message"]


def test_planted_near_duplicates_are_found_and_nothing_else(dedup: Dedup) -> None:
    rng = random.Random(1)
    words = [f"word{n}" for n in range(3000)]
    texts = [" ".join(rng.choices(words, k=150)) for _ in range(1500)]
    planted = {}
    for number in range(150):
        changed = texts[number].split()
        changed[rng.randrange(150)] = "changed"
        planted[f"d{1500 + number:04d}"] = f"d{number:04d}"
        texts.append(" ".join(changed))
    dedup.run(dedup.write([{"id": f"d{n:04d}", "text": text} for n, text in enumerate(texts)]))
    assert {row: cluster for row, cluster in dedup.clusters().items() if row != cluster} == planted


@pytest.mark.parametrize("encoding", ["cp1252", "gb18030", "utf-16", "utf-8-sig"])
def test_another_encoding_is_read_and_never_taken_for_utf_8(dedup: Dedup, encoding: str) -> None:
    chinese, french = "退款什么时候到账？我已经等了三个星期了", "Où est ma commande ? C’est très décevant."
    text = chinese if encoding == "gb18030" else french
    given = {"a": text, "b": f"{text} {text[::-1]}", "c": text[::-1]}
    rows = [json.dumps({"id": name, "text": said}, ensure_ascii=False) for name, said in given.items()]
    dedup.run(dedup.write("\n".join(rows).encode(encoding)))
    assert dedup.kept() == given
    assert dedup.quarantined() == []


def test_one_line_that_is_not_utf_8_is_set_aside(dedup: Dedup) -> None:
    good = json.dumps({"id": "a", "text": "ééééé et plus"}, ensure_ascii=False).encode()
    dedup.run(dedup.write(good + b'\n{"id": "b", "text": "caf\xe9"}\n'))
    assert dedup.kept() == {"a": "ééééé et plus"}
    assert [row["line"] for row in dedup.quarantined()] == [2]
