"""The rules for pages and for languages: boilerplate, Gopher's document rules, language."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus import rules
from corpus.rules import Drop, Verdict
from corpus.rules.alphabetic_words import alphabetic_words
from corpus.rules.boilerplate import boilerplate
from corpus.rules.language import language
from corpus.rules.line_shape import line_shape
from corpus.rules.stop_words import stop_words
from corpus.rules.symbol_ratio import symbol_ratio
from corpus.rules.word_length import word_length
from refit.errors import BadSpec
from refit.spec import Rule

SHARED = Path(os.environ.get("REFIT_SHARED_DATA", "/nonexistent"))

PROSE = "The lamp that you sent to me has come, and the glass of it was broken when we opened the parcel. " * 4
CHINESE = "昨天收到的台灯打开包裹的时候玻璃已经碎了，请问可以退款吗？我们已经把照片发给客服，可是还没有回复。" * 4
THAI = "โคมไฟที่คุณส่งมาถึงแล้วแต่กระจกแตกเมื่อเราเปิดพัสดุ กรุณาคืนเงินให้ฉันด้วย " * 15
KOREAN = "어제 받은 등은 상자를 열 때 이미 깨져 있었습니다 환불 을 해 줄 수 있나요 " * 6
GERMAN = (
    "Die Lampe, die Sie mir geschickt haben, ist angekommen, aber das Glas war zerbrochen, als wir sie auspackten. "
)
CODE = "Use this:\n```python\nfor number in range(10):\n    print(number, number ** 2, end='; ')\n```\n"
RULES: list[Callable[[str], Verdict]] = [
    alphabetic_words, boilerplate, language, line_shape, stop_words, symbol_ratio, word_length,
]  # fmt: skip


@settings(deadline=None)  # the first call loads the languages
@given(
    st.text(max_size=200)
    | st.lists(st.sampled_from(["Home", "a\n", "```\n", "\u2028", "| ", "…", "#", "退"])).map("".join)
)
def test_no_rule_raises_whatever_the_text_and_what_one_changes_it_leaves_alone_next_time(text: str) -> None:
    for rule in RULES:
        verdict = rule(text)
        if isinstance(verdict, str):
            assert rule(verdict) is None, rule


@settings(deadline=None)  # the first call loads the languages
@given(st.text(min_size=1).map(lambda text: f"{text} " * 60))
def test_no_rule_raises_on_a_text_that_is_long_enough_to_judge(text: str) -> None:
    for rule in RULES:
        rule(text)


@pytest.mark.parametrize("text", [PROSE, CHINESE, THAI, KOREAN, CODE, "", "ok"])
def test_prose_in_any_script_and_code_pass_gophers_rules(text: str) -> None:
    for rule in (alphabetic_words, line_shape, stop_words, symbol_ratio, word_length):
        assert rule(text) is None, rule


def test_the_mean_length_of_words_has_two_ends() -> None:
    assert word_length("a b c 1 2 of " * 20) == Drop("its words have 1.2 characters in the mean, 3 to 10 are allowed")
    assert isinstance(word_length("0x9f86d081884c7d659a2feaa0c55ad015 " * 60), Drop)
    assert word_length("a b c " * 10) is None, "too few to judge"
    assert word_length("a b c " * 20, min_mean=1) is None


def test_words_need_letters_and_a_table_of_numbers_has_none() -> None:
    table = "lamp 12.50 3 37.50 | chair 80.00 1 80.00 | " * 10
    assert alphabetic_words(table) == Drop("20% of words have a letter, 80% are needed")
    assert alphabetic_words(table, min_share=0.2) is None


def test_hash_signs_and_ellipses_are_counted_apart_and_a_chinese_ellipsis_is_one() -> None:
    assert isinstance(symbol_ratio("#lamp #light #sale buy it now " * 10), Drop)
    assert isinstance(symbol_ratio("read on ... and on … " * 15), Drop)
    assert symbol_ratio(CHINESE + "……" * 4) is None
    assert isinstance(symbol_ratio("台灯…… 玻璃…… " * 20), Drop)


def test_a_page_of_bullets_or_of_teasers_goes_and_a_short_list_stays() -> None:
    assert line_shape("- lamp\n* chair\n• desk\n\n") is None
    assert line_shape("- lamp\n* chair\n• desk\n●台灯\n- sofa\n") == Drop("100% of lines begin with a bullet")
    assert line_shape("Lamps\n" + "- a lamp\n" * 8) is None, "a list with its heading is 89 %"
    assert isinstance(line_shape("Ten lamps that you...\nWhat she said…\nOne\nTwo\nThree\n"), Drop)
    assert line_shape("-1\n-2\n-3\n-4\n-5\n") is None, "numbers below zero are no bullets"


def test_keywords_without_stop_words_go_and_another_language_names_its_own() -> None:
    keywords = "cheap lamp buy lamp online lamp shop sale discount lamps " * 6
    assert stop_words(keywords) == Drop("0 different stop words, 2 are needed")
    assert isinstance(stop_words(GERMAN * 4), Drop)
    assert stop_words(GERMAN * 4, words="die, der, das, ist") is None


PAGE = """Home | Our lamps | Contact us
Skip to main content
We use cookies to give you the best experience. Accept all cookies
The lamp is made of glass, and each is blown by hand.

| lamp | price | stock |
Please enable JavaScript to view this page.
Read more »
© 2024 Lamps Ltd. All rights reserved.
首页
京ICP备 12345678号"""


def test_boilerplate_goes_and_what_the_page_says_stays() -> None:
    assert boilerplate(PAGE) == ("The lamp is made of glass, and each is blown by hand.\n\n| lamp | price | stock |")
    assert boilerplate(PROSE) is None
    assert isinstance(boilerplate("Home\nLog in\nTerms of use"), Drop)
    assert isinstance(boilerplate(PAGE + "\nLorem ipsum dolor sit amet"), Drop)


def test_boilerplate_leaves_code_and_paragraphs_alone() -> None:
    code = "See:\n```html\n<script type='text/javascript'>\nHome\n```"
    assert boilerplate(code) is None
    assert boilerplate("In its ruling on the use of cookies " + "the court held much and more " * 10) is None
    for kept in ("Title | Artist | Year", "The home | chair pair", "A function in JavaScript that sums two numbers:"):
        assert boilerplate(kept) is None


@pytest.mark.parametrize("text", [PROSE, CHINESE, CODE, "Hola", "¿Dónde?", "", "7 + 5 = 12", f"`{GERMAN}`"])
def test_languages_to_keep_and_what_is_too_short_to_judge_stay(text: str) -> None:
    assert language(text) is None


def test_another_language_goes_and_says_which() -> None:
    assert language(GERMAN) == Drop("it is in de and not in en or zh")
    assert language(THAI, keep="en") == Drop("it is in th and not in en")
    assert language(CHINESE, keep="en") == Drop("it is in zh and not in en")
    assert language(GERMAN, keep="de, fr") is None
    assert language(GERMAN, min_confidence=1.0) is None, "nothing is as sure as that"


def test_another_version_of_what_tells_languages_apart_is_another_rule() -> None:
    step, plain = rules.build([Rule(name="language"), Rule(name="boilerplate")])
    assert (step.libraries, plain.libraries) == (("py3langid",), ())


def test_a_language_that_is_not_known_names_the_known_ones() -> None:
    with pytest.raises(BadSpec, match=r"language.keep: there is no 'english'. Known: .*, en, "):
        language(PROSE, keep="english")


@pytest.mark.skipif(not SHARED.is_dir(), reason="REFIT_SHARED_DATA names no folder of public data")
def test_real_texts_are_told_by_their_language() -> None:
    """A rule that throws good answers away is worse than none; one that lets all through is none."""
    texts = {
        "en": [row["output"] for row in json.loads((SHARED / "sft/alpaca_en_demo.json").read_text(encoding="utf-8"))],
        "zh": [row["output"] for row in json.loads((SHARED / "sft/alpaca_zh_demo.json").read_text(encoding="utf-8"))],
    }
    for own, other in (("en", "zh"), ("zh", "en")):
        dropped = sum(isinstance(language(text, keep=own), Drop) for text in texts[own])
        assert dropped <= 0.03 * len(texts[own]), own
        judged = [text for text in texts[own] if len(text) >= 100]
        dropped = sum(isinstance(language(text, keep=other), Drop) for text in judged)
        assert dropped >= 0.9 * len(judged), own
