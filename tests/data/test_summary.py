"""The page of a `prepare`: what people wrote stays text, and Data Docs are found from where the page lies."""

from __future__ import annotations

import pytest

from corpus import summary
from corpus.walk import Done
from refit.manifest import Manifest

EVIL = "<script>alert(1)</script>"


def done(phase: str, uri: str, **facts: object) -> Done:
    counts = {"records_in": 10, "records_out": 9, "quarantined": 1}
    manifest = Manifest(kind="records", fingerprint="f", facts={**counts, **facts})
    return Done(phase=phase, uri=uri, manifest=manifest, cached=False, seconds=1.0)


def test_what_comes_from_data_stays_text() -> None:
    door = done("doors", "file:///s/doors/d", expectations={"asked": 2, "met": 1, "told": [EVIL], "failed": [EVIL]})
    clean = done("clean", "file:///s/clean/c", reasons={EVIL: 1}, rules={EVIL: {"kept": 9, "dropped": 1}})
    page = summary.page(EVIL, [clean], {"clean": door}, "file:///s/jobs/l/r/prepare")
    assert "<script" not in page
    assert page.count("&lt;script&gt;") == 5


@pytest.mark.parametrize(
    ("uri", "place", "link"),
    [
        ("file:///s/doors/d", "file:///s/jobs/l/r", 'href="../../../doors/d/data_docs/index.html"'),
        ("s3://b/s/doors/d", "s3://b/s/jobs/l", 'href="../../doors/d/data_docs/index.html"'),
        ("s3://b/s/doors/d", "file:///s/jobs/l", "s3://b/s/doors/d/data_docs/index.html"),
    ],
)
def test_data_docs_are_linked_from_where_the_page_lies(uri: str, place: str, link: str) -> None:
    door = done("doors", uri, expectations={"asked": 1, "met": 1, "told": [], "failed": []})
    assert link in summary.page("l", [], {"clean": door}, place)


def test_a_run_that_was_refused_before_its_first_phase_has_a_page() -> None:
    assert "what the data stage did" in summary.page("l", [], {}, "file:///s/jobs/l")
