"""Each rule by what it keeps, changes and drops; and the registry that a spec is checked against."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from corpus import rules
from corpus.rules import Drop
from corpus.rules.control_characters import control_characters
from corpus.rules.length import length
from corpus.rules.repeats import repeated_share, repeats
from corpus.rules.url_ratio import url_ratio
from refit.errors import BadSpec
from refit.spec import Rule


def test_control_characters_are_taken_out_and_emoji_stay_whole() -> None:
    family = "a \U0001f468\u200d\U0001f469\u200d\U0001f467 \u2764\ufe0f"
    assert control_characters(family) is None
    assert control_characters("a\tb\r\nc") is None
    assert control_characters("tell me\x00 more about the parcel that never came") == (
        "tell me more about the parcel that never came"
    )
    assert isinstance(control_characters("\x1b[0m\x00\x01 ok"), Drop)


@pytest.mark.parametrize("text", ["", "  \n", "...", "?! –", "。、"])
def test_length_drops_what_says_nothing(text: str) -> None:
    assert isinstance(length(text), Drop)


@pytest.mark.parametrize("text", ["7", "\U0001f600", "+", "好", "a."])
def test_length_keeps_what_says_something(text: str) -> None:
    assert length(text) is None


def test_length_has_two_ends() -> None:
    assert isinstance(length("four", min_chars=5), Drop)
    assert isinstance(length("four", max_chars=3), Drop)
    assert length("four", min_chars=4, max_chars=4) is None


def test_url_ratio_counts_characters() -> None:
    assert url_ratio("see https://example.com/a for the price of the lamp in the shop") is None
    assert url_ratio("look https://example.com/a/very/long/path www.example.com/b") == Drop(
        "90% of characters are links"
    )


def test_repeats_judges_long_texts_only() -> None:
    assert repeats("no " * 40) is None
    assert isinstance(repeats("buy now and save money today " * 20), Drop)
    assert isinstance(repeats("今天天气很好我们去公园" * 10), Drop)
    assert repeats(" ".join(f"word{n}" for n in range(200))) is None


def test_overlapping_repeats_count_once() -> None:
    words = list("abcabcabc")
    assert repeated_share(words, 3) == pytest.approx(6 / 9)


def test_an_unknown_rule_names_the_known_ones() -> None:
    with pytest.raises(BadSpec, match=r"data.rules\[1\].name is 'lenght': no such rule. Did you mean length\? Known: "):
        rules.build([Rule(name="length"), Rule(name="lenght")])


def test_an_unknown_argument_and_a_wrong_type_are_named() -> None:
    with pytest.raises(BadSpec, match=r"data.rules\[0\].args.max_char: length has no such argument. Did you mean max_"):
        rules.build([Rule(name="length", args={"max_char": 3})])
    with pytest.raises(BadSpec, match="is True: expected int"):
        rules.build([Rule(name="length", args={"max_chars": True})])
    with pytest.raises(BadSpec, match="is 'a': expected float"):
        rules.build([Rule(name="url_ratio", args={"max_share": "a"})])
    assert rules.build([Rule(name="url_ratio", args={"max_share": 1})])[0].name == "url_ratio"


def test_the_rule_that_the_readme_shows_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_RULES", {})
    readme = (Path(__file__).parents[2] / "images" / "data" / "README.md").read_text(encoding="utf-8")
    made: dict[str, Any] = {}
    exec(readme.partition("```python\n")[2].partition("```")[0], made)  # noqa: S102
    assert made["shouting"]("WHERE IS MY LAMP") == Drop("100% of letters are capitals")
    assert made["shouting"]("Where is my lamp") is None
    assert list(rules._RULES) == ["shouting"]


def test_a_rule_must_be_a_function_of_a_text_and_keywords() -> None:
    def two(text: str, other: str) -> None:
        return None

    with pytest.raises(TypeError, match="expected"):
        rules.rule(two)
