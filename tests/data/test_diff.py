"""How the data moved: nothing between a dataset and itself, and what did move by name."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corpus.diff import diff, jensen_shannon, psi, script
from corpus.diff_page import page
from refit.errors import BadInput

if TYPE_CHECKING:
    from tests.data.conftest import Line

COUNTS = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 50), max_size=6).map(Counter)


@given(COUNTS, COUNTS)
def test_the_divergence_is_symmetric_and_between_0_and_1(old: Counter[str], new: Counter[str]) -> None:
    found = jensen_shannon(old, new)
    assert 0 <= found <= 1
    assert found == pytest.approx(jensen_shannon(new, old))
    assert jensen_shannon(old, old) == pytest.approx(0, abs=1e-12)
    if old and new and not old.keys() & new.keys():
        assert found == pytest.approx(1)


@given(st.lists(st.integers(0, 100), min_size=2, max_size=10))
def test_the_stability_index_is_0_for_itself_and_finite_for_anything(counts: list[int]) -> None:
    assert psi(counts, counts) == pytest.approx(0)
    assert math.isfinite(psi(counts, counts[::-1]))
    assert psi(counts, counts[::-1]) >= 0


@pytest.mark.parametrize(
    ("text", "name"),
    [("退款什么时候到账", "han"), ("返金はいつ届きますか", "kana"), ("환불은 언제", "hangul"),
     ("Где заказ", "cyrillic"), ("Größe und so", "latin"), ("12 + 3 = 15", "none"), ("iPhone 手机坏了请退款", "han")],
)  # fmt: skip
def test_a_text_is_of_the_script_of_most_of_its_letters(text: str, name: str) -> None:
    assert script(text) == name


def test_a_dataset_and_itself(small: Line) -> None:
    folder = small.dataset().as_uri()
    found = diff(folder, f"{folder}/manifest.json")
    assert found["moved"] == []
    assert found["records"]["added"] == found["records"]["removed"] == 0
    assert found["records"]["kept"] == found["old"]["records"]
    assert found["vocabulary"]["divergence"] == 0
    assert found["shares"]["domain"]["distance"] == 0
    assert "Nothing moved." in page(found)


def test_what_moved_is_named_and_shown(small: Line) -> None:
    old = small.dataset().as_uri()
    rows = [
        {"instruction": f"我的第{number}个包裹什么时候到<script>？", "output": json.dumps({"mood": "bad"})}
        for number in range(1000, 1120)
    ]
    small.deliver("web", rows, domain="web")
    new = small.dataset().as_uri()
    found = diff(old, new)
    assert {"domain", "script", "vocabulary"} <= set(found["moved"])
    assert found["records"]["added"] > 50
    assert found["records"]["removed"] == 0
    assert found["shares"]["domain"]["shares"]["web"][0] == 0
    assert "包" in found["vocabulary"]["unseen"]
    html = page(found)
    assert "Moved: " in html
    assert "<script>" not in html
    code, answer = small.corpus("diff", old, new, "--html", str(small.folder / "diff.html"))
    assert (code, answer["moved"]) == (0, found["moved"])
    assert (small.folder / "diff.html").read_text() == html


def test_records_that_are_gone_are_told(small: Line) -> None:
    folder = small.dataset()
    with pytest.raises(BadInput, match="dataset"):
        diff((folder.parents[1] / "nowhere").as_uri(), folder.as_uri())
    (small.phase(folder, "split") / "manifest.json").unlink()
    with pytest.raises(BadInput, match="not in the store any more"):
        diff(folder.as_uri(), folder.as_uri())
