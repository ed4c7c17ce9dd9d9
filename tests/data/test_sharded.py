"""Shards: where files are cut, who makes which, what is made again; and whatever is killed goes on where it was."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus import cut, readers, said
from corpus.phases import SHARED_OUT
from corpus.prepare import share
from corpus.sharded import added
from refit import job
from refit.job import Job
from refit.pipeline import load

if TYPE_CHECKING:
    from refit.manifest import Manifest
    from tests.data.conftest import Line, Sentences


def test_two_reports_are_added_up_name_by_name() -> None:
    left = {"records": 2, "rules": {"length": {"kept": 1}}, "name": "a", "whole": True}
    right = {"records": 3, "rules": {"length": {"kept": 4}, "url": {"kept": 5}}, "name": "b", "whole": True}
    assert added(left, right) == {
        "records": 5, "rules": {"length": {"kept": 5}, "url": {"kept": 5}}, "name": "a", "whole": True
    }  # fmt: skip


LINE = st.sampled_from(['{"a": 1}', '{"a": "\u2028 é 退款"}', "", "   ", "not json", '{"a": "' + "x" * 90 + '"}'])


@settings(max_examples=200, deadline=None)
@given(st.lists(LINE, max_size=40), st.sampled_from(["\n", "\r\n"]), st.booleans(), st.booleans())
def test_a_file_in_stretches_has_the_lines_that_it_has_whole(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], end: str, mark: bool, closed: bool
) -> None:
    path = tmp_path_factory.mktemp("cut") / "in.jsonl"
    text = ("\ufeff" if mark else "") + end.join(lines) + (end if closed else "")
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cut, "SHARD_BYTES", 64)
        patch.setattr(cut, "BLOCK", 7)
        found = list(cut.slices("in.jsonl", path))
    rows = [row for one in found for row in readers.read(path, "in.jsonl", one.span)]
    assert rows == list(readers.read(path, "in.jsonl"))
    assert sum(one.size for one in found) == path.stat().st_size
    assert len({one.role for one in found}) == len(found)
    assert all(before.span.stop == after.span.start for before, after in pairwise(found) if before.span and after.span)


def test_a_file_that_grows_keeps_its_earlier_stretches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut, "SHARD_BYTES", 1000)
    path = tmp_path / "log.jsonl"
    path.write_text("".join(f'{{"n": {n}}}\n' for n in range(500)))
    before = [(one.role, one.digest) for one in cut.slices("log.jsonl", path)]
    with path.open("a") as more:
        more.writelines(f'{{"n": {n}}}\n' for n in range(500, 700))
    after = [(one.role, one.digest) for one in cut.slices("log.jsonl", path)]
    assert len(after) > len(before) > 3
    assert after[: len(before) - 1] == before[:-1]


@pytest.mark.parametrize("name", ["array.json", "packed.jsonl.gz", "wide.jsonl", "table.csv"])
def test_what_has_no_lines_of_its_own_is_one_shard(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut, "SHARD_BYTES", 100)
    rows = [{"text": f"row {n}"} for n in range(100)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path = tmp_path / name
    path.write_bytes(
        {
            "array.json": json.dumps(rows, indent=1).encode(), "packed.jsonl.gz": gzip.compress(text.encode()),
            "wide.jsonl": text.encode("utf-16"), "table.csv": b"text\n" + b'"a\nb"\n' * 100,
        }[name]
    )  # fmt: skip
    (whole,) = cut.slices(name, path)
    assert whole.span is None


def test_lines_are_cut_whatever_the_copy_on_this_machine_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What S3 holds lies here under a name of its own."""
    monkeypatch.setattr(cut, "SHARD_BYTES", 100)
    copy = tmp_path / "0f3a"
    copy.write_text("".join(f'{{"n": {n}}}\n' for n in range(100)))
    assert len(list(cut.slices("big.jsonl", copy))) > 5


def test_the_same_bytes_in_another_encoding_are_another_stretch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cut, "SHARD_BYTES", 70_000)
    rest = b'{"n": 1}\n' * 20_000
    chinese = "我上个月在你们店里买了一台咖啡机，用了三天就坏了，请尽快给我退款。".encode("gb18030") * 900
    heads = [b'{"text": "' + text + b'"}\n' for text in (b"a" * len(chinese), chinese)]
    roles = []
    for number, head in enumerate(heads):
        path = tmp_path / f"{number}.jsonl"
        path.write_bytes(head + rest)
        roles.append({(one.role, one.digest) for one in cut.slices("x.jsonl", path) if one.span and one.span.line > 1})
    assert roles[0]
    assert not roles[0] & roles[1]


def test_keys_are_read_from_any_row_groups(tmp_path: Path) -> None:
    keys = np.arange(600_000, dtype=np.uint64).reshape(-1, 2)
    column = pa.FixedSizeBinaryArray.from_buffers(said.KEY, len(keys), [None, pa.py_buffer(keys.tobytes())])
    pq.write_table(pa.table({"said_key": column}), tmp_path / "texts.parquet", row_group_size=len(keys))
    assert (said.keys(tmp_path, "said") == keys).all()


def test_small_files_share_a_shard_and_big_ones_have_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut, "SHARD_BYTES", 100)
    sizes = [30, 30, 30, 30, 250, 10]
    found = [cut.Slice(f"f{n}", "", size, Path) for n, size in enumerate(sizes)]
    assert [[one.size for one in shard] for shard in cut.shared_out(found)] == [[30, 30, 30], [30], [250], [10]]


@pytest.fixture
def big(line: Line, texts: Sentences, monkeypatch: pytest.MonkeyPatch) -> Line:
    """A line of three sources in some twenty shards."""
    monkeypatch.setattr(cut, "SHARD_BYTES", 2500)
    many = texts(420)
    for number, name in enumerate(("mail", "chat", "calls")):
        rows = [{"prompt": text, "completion": '{"mood": "good"}'} for text in many[number * 140 : number * 140 + 140]]
        line.deliver(name, rows, weight=1 + number)
    line.data["expect"] = {"min_records": 10, "max_label_share": 1.0}
    return line


def shards_made(answer: dict[str, Any]) -> dict[str, tuple[int, int]]:
    return {one["name"]: (one["shards_made"], one["shards"]) for one in answer["phases"] if "shards" in one}


def test_one_three_or_sixteen_machines_make_the_same_to_the_byte(big: Line) -> None:
    found: list[Manifest] = []
    for machines in (1, 3, 16):
        big.store = f"file://{big.folder}/store{machines}"
        spec = load(big.write())
        for name in SHARED_OUT:
            for number in reversed(range(machines)):
                options = {"share": number, "shares": machines, "round": name}
                output = f"{big.store}/jobs/{name}{number}"
                job.run(Job.build("share", spec, store=big.store, output=output, options=options), share)
        code, answer = big.prepare()
        assert code == 0, answer
        made = shards_made(answer)
        assert made["ingest"][1] > 16
        assert [of for of, _ in made.values()] == [0, 0, 0, 0, 0]
        found.append(big.manifest(Path(answer["manifest"].removeprefix("file://")).parent))
    assert found[0].files == found[1].files == found[2].files


def test_of_a_source_that_grew_only_the_new_shards_are_made(big: Line) -> None:
    big.dataset()
    path = big.folder / "raw" / "mail" / "part.jsonl"
    with path.open("a") as more:
        more.write('{"prompt": "an order that came too late to matter", "completion": "{\\"mood\\": \\"bad\\"}"}\n')
    code, answer = big.prepare()
    assert code == 0
    grown = dict.fromkeys(("ingest", "clean", "tokenize", "sign"), 1) | {"match": 4}  # it asks all of all
    assert {name: made for name, (made, _) in shards_made(answer).items()} == grown
    big.deliver("more", [{"prompt": "a new source", "completion": '{"mood": "bad"}'}])
    assert {name: made for name, (made, _) in shards_made(big.prepare()[1]).items()} == grown


def test_a_shard_that_lost_a_file_is_made_again_alone(big: Line) -> None:
    folder = big.dataset()
    shard = sorted((folder.parents[1] / "shards" / "clean").iterdir())[3]
    (shard / "texts.parquet").unlink()
    code, answer = big.prepare()
    assert code == 0
    assert shards_made(answer)["clean"][0] == 1
    assert (shard / "texts.parquet").is_file()
    assert [one["name"] for one in answer["phases"] if not one["cached"]] == ["clean"]


@pytest.fixture
def heavy(line: Line) -> Line:
    """A line of four shards that are worth processes of their own."""
    for source in range(4):
        rows = [
            {"prompt": f"question {n} of {source}: " + " ".join(f"w{n * m}" for m in range(60)), "completion": "yes"}
            for n in range(4000)
        ]
        line.deliver(f"s{source}", rows)
    line.data.update(label_key=None, system="", pack_length=1024)
    return line


def workers(parent: int, at_least: int = 2) -> list[int]:
    """The processes that make shards for another, once there are some."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = []
        for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            try:
                command = Path(f"/proc/{child}/cmdline").read_bytes()
            except FileNotFoundError:
                continue
            found += [int(child)] if b"spawn_main" in command else []
        if len(found) >= at_least:
            return found
        time.sleep(0.02)
    raise AssertionError("no worker came")


def started(line: Line) -> subprocess.Popen[str]:
    path = line.write()
    program = "import sys; from corpus.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "prepare", str(path), "--store", line.store]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


@pytest.mark.integration
def test_a_process_that_dies_with_its_shard_is_told_and_the_rest_is_kept(heavy: Line) -> None:
    run = started(heavy)
    os.kill(workers(run.pid)[0], signal.SIGKILL)
    output, _ = run.communicate(timeout=120)
    assert run.returncode == 30
    assert "a process that made a shard died" in json.loads(output.splitlines()[-1])["message"]
    code, answer = heavy.prepare()
    assert code == 0, answer


@pytest.mark.integration
def test_nothing_goes_on_when_the_job_is_killed(heavy: Line) -> None:
    run = started(heavy)
    found = workers(run.pid)
    run.kill()
    run.wait()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in found) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [pid for pid in found if Path(f"/proc/{pid}").exists()]
    assert heavy.prepare()[0] == 0
