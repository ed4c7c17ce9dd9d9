"""The page of bad records: who may see it, what it tells, and that a hostile sample stays text, in a real browser."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from corpus.quarantine import Quarantine
from operators import projection, quarantine
from refit.job import Job, JobRun
from refit.manifest import Manifest
from refit.pipeline import load
from refit.states import State
from refit.store import join, store_for

pytestmark = pytest.mark.integration
AsUser = Callable[[str], dict[str, str]]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
TINY = Path(__file__).resolve().parents[2] / "dags/pipelines/tiny.yaml"
EVIL = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
REFUSED = "390 of 4000 records are bad (9.8%); data.max_bad_ratio allows 5.0%. Commonest: not JSON (240)."


@pytest.fixture
def job(database: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """A refused data job with two phases' bad records, copied as Airflow's side does it."""
    store = (tmp_path / "store").as_uri()
    monkeypatch.setenv("REFIT_STORE", store)
    monkeypatch.delenv("REFIT_AIRFLOW_URL", raising=False)
    made = Job.build(
        "prepare", load(TINY), store=store, output=join(store, "jobs/tiny/r1/prepare"), id="prepare-tiny-1"
    )
    made.save()
    uri = join(store, "datasets/tiny/ingest/abc")
    with store_for(uri).publish(uri) as draft:
        with Quarantine(draft.path / quarantine.FILE) as bad:
            for number in range(240):
                bad.add(
                    "tickets", "2026-11.jsonl", number, f"not JSON: Expecting value at {number}", f'{{"note": {number}'
                )
            for number in range(110):
                bad.add("chats", "export.csv", number, "length: the answer has 0 characters", "hello? / ")
            for number in range(40):
                bad.add(EVIL, EVIL, number, f"{EVIL}: {EVIL}", EVIL)
        (draft.path / "data_docs").mkdir()
        (draft.path / "data_docs/index.html").write_text("<h1>Docs</h1>")
        draft.commit(Manifest(kind="records", fingerprint="abc"))
    run = JobRun(made, store_for(store).local(made.output))
    run.event(State.RUNNING, "ingest put 390 records into quarantine", quarantine=[uri])
    run.event(State.FAILED, REFUSED, error="BadRecords")
    assert projection.project(made, "scheduled__2026-11-29")
    assert quarantine.project(made)
    return made


@pytest.mark.parametrize("path", ["quarantine", "static/quarantine.js", "api/quarantine", "api/quarantine/x"])
def test_nobody_sees_bad_records_without_saying_who_they_are(server: Any, path: str) -> None:
    assert server.get(f"/refit/{path}").status_code == 401


def test_a_job_s_counts_are_true_and_its_samples_are_of_every_kind(server: Any, as_user: AsUser, job: Job) -> None:
    (met,) = server.get("/refit/api/quarantine", headers=as_user("vera")).json()
    assert (met["id"], met["pipeline"], met["records"]) == (job.id, "tiny", 390)
    found = server.get(f"/refit/api/quarantine/{job.id}", headers=as_user("vera")).json()
    assert [(row["source"], row["records"]) for row in found["kinds"]] == [("tickets", 240), ("chats", 110), (EVIL, 40)]
    assert {row["source"] for row in found["samples"][:3]} == {"tickets", "chats", EVIL}
    assert (found["state"], found["reason"]) == ("failed", REFUSED)
    assert server.get(found["docs"], headers=as_user("vera")).text == "<h1>Docs</h1>"
    only = {"source": "chats", "kind": "length"}
    found = server.get(f"/refit/api/quarantine/{job.id}", headers=as_user("vera"), params=only).json()
    assert {row["source"] for row in found["samples"]} == {"chats"}


def test_a_line_that_may_not_be_read_tells_nothing(
    server: Any, as_user: AsUser, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    from refit_board import app as board

    monkeypatch.setattr(board, "may", lambda method, line, user: line != "tiny")
    assert server.get("/refit/api/quarantine", headers=as_user("vera")).json() == []
    assert server.get(f"/refit/api/quarantine/{job.id}", headers=as_user("vera")).status_code == 404


def test_an_unknown_job_is_a_404_and_a_database_that_is_away_is_said(
    server: Any, as_user: AsUser, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("unknown", "a%00b"):
        assert server.get(f"/refit/api/quarantine/{name}", headers=as_user("vera")).status_code == 404
    monkeypatch.setenv("REFIT_DATABASE_URL", "postgresql://refit@127.0.0.1:9/refit")
    answer = server.get("/refit/api/quarantine", headers=as_user("vera"))
    assert answer.status_code == 503
    assert "History is away" in answer.json()["detail"]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
def test_a_person_sees_counts_and_samples_and_they_stay_text(address: str, job: Job, tmp_path: Path, app: Any) -> None:
    common = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1280,1300",
        "--virtual-time-budget=6000", f"--user-data-dir={tmp_path / 'profile'}",
    ]  # fmt: skip
    target = f"{address}/login/vera?to=/refit/quarantine?job={job.id}"
    if keep := os.environ.get("REFIT_SCREENSHOTS"):
        picture = Path(keep) / "bad-records.png"
        subprocess.run([*common, f"--screenshot={picture}", target], check=True, capture_output=True, timeout=120)
    page = subprocess.run(
        [*common, "--dump-dom", target], check=True, capture_output=True, text=True, timeout=120
    ).stdout
    for words in ("tiny: 390 bad records", "not JSON", "240", "2026-11.jsonl:0", "Data Docs", "data.max_bad_ratio"):
        assert words in page, words
    assert "<title>Refit: bad records</title>" in page
    assert "&lt;img src=x onerror=" in page
    assert "<img" not in page
