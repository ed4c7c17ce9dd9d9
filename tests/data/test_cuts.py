"""Objects elsewhere: read by the machine that cuts them and by those that use them, and by no other."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from corpus.cuts import Cuts
from corpus.phases import SHARED_OUT
from corpus.prepare import prepare, share
from refit import job
from refit.errors import StoreUnavailable
from refit.job import Handler, Job
from refit.manifest import Manifest
from refit.pipeline import load
from refit.store import store_for

if TYPE_CHECKING:
    from tests.data.conftest import Line, Sentences


def test_who_only_has_to_know_where_an_object_is_cut_does_not_fetch_it(
    small: Line, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for source in small.data["sources"]:
        for path in (small.folder / "raw" / source["name"]).iterdir():
            store_for(bucket).write(f"{bucket}/raw/{source['name']}/{path.name}", path.read_bytes())
        source["uri"] = f"{bucket}/raw/{source['name']}"

    def fetched(machine: str, work: Callable[[], object]) -> int:
        """How many objects a machine with nothing on its disk fetches."""
        monkeypatch.setenv("REFIT_CACHE", str(small.folder / machine))
        work()
        return sum(
            path.suffix == "" and path.is_file() for path in (small.folder / machine).glob("fetched/objects/*/*")
        )

    def shared(name: str, number: int) -> None:
        options = {"round": name, "share": number, "shares": 2}
        output = f"{small.store}/jobs/{name}{number}"
        spec = load(small.write())
        job.run(Job.build("share", spec, store=small.store, output=output, options=options), share)

    assert [fetched(f"cut{number}", partial(shared, "cut", number)) for number in range(2)] == [2, 1]
    assert sorted(fetched(f"read{number}", partial(shared, "records", number)) for number in range(2)) == [1, 2]
    assert fetched("rest", small.dataset) == 0


def test_an_object_that_was_replaced_since_it_was_cut_is_not_read_as_what_it_was(bucket: str) -> None:
    uri = f"{bucket}/raw/mail.jsonl"
    store = store_for(uri)
    store.write(uri, b'{"prompt": "a", "completion": "b"}\n')
    (found,) = Cuts(f"{bucket}/cuts").of("mail.jsonl", uri)
    assert found.fetch().read_bytes() == store.read(uri)
    store.write(uri, b'{"prompt": "a", "completion": "c"}\n')
    with pytest.raises(StoreUnavailable, match="replaced while it was read"):
        found.fetch()
    (again,) = Cuts(f"{bucket}/cuts").of("mail.jsonl", uri)
    assert again.digest != found.digest


def test_machines_of_a_run_see_the_rows_that_the_first_one_was_given(
    line: Line, texts: Sentences, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REFIT_CONNECTION_CRM", f"sqlite:///{tmp_path}/crm.db")
    crm = sqlite3.connect(tmp_path / "crm.db", isolation_level=None)
    crm.execute("CREATE TABLE t (prompt, completion)")
    crm.executemany("INSERT INTO t VALUES (?, ?)", [(text, '{"mood": "good"}') for text in texts(40)])
    line.data["sources"].append({"name": "crm", "uri": "sql://crm", "query": "SELECT * FROM t"})
    line.data["machines"] = 2
    line.data["expect"] = {"min_records": 10, "max_label_share": 1.0}
    spec, run = load(line.write()), f"{line.store}/runs/small/one"

    def work(kind: str, handler: Handler, name: str, options: dict[str, Any]) -> Manifest:
        return job.run(Job.build(kind, spec, store=line.store, output=f"{run}/{name}", options=options), handler)

    for name in ("cut", *SHARED_OUT):
        for number in range(2):
            work("share", share, f"{name}{number}", {"round": name, "share": number, "shares": 2})
            crm.execute("INSERT INTO t VALUES ('a row that came later', '{}')")
    made = work("prepare", prepare, "prepare", {})
    phases = made.facts["phases"]
    assert phases[0]["records_in"] == 40
    assert [phase["shards_made"] for phase in phases if "shards" in phase] == [0, 0, 0, 0, 0]
    extracts = tmp_path / run.removeprefix(f"file://{tmp_path}/") / "extracts"
    assert list(extracts.iterdir()) == [], "a run that has its dataset needs them no more"
