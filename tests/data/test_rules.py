"""Each rule by what it keeps, changes and drops; and the registry that a spec is checked against."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus import rules
from corpus.rules import Drop
from corpus.rules.control_characters import control_characters
from corpus.rules.html import html_markup
from corpus.rules.length import length
from corpus.rules.personal_data import personal_data
from corpus.rules.repeated_lines import repeated_lines
from corpus.rules.repeats import repeated_share, repeats
from corpus.rules.secrets import secrets
from corpus.rules.unicode_form import mend, unicode_form
from corpus.rules.url_ratio import url_ratio
from corpus.shingles import Texts
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


def test_html_is_taken_out_of_pages_and_left_in_code() -> None:
    page = "<p>One &amp; two<br>three</p><script>if (a < b) {}</script><!-- no --><div class='x'>four</div>"
    assert html_markup(page) == "One & two\nthree\nfour"
    for kept in (
        "a < b and c > d",
        "<think>so</think> List<int>",
        "use `<p>` and `<div>` and `<b>`",
        "one <b>word</b>",
    ):
        assert html_markup(kept) is None
    assert html_markup(f"{page}\n```\n<p>code</p>\n```") == "One & two\nthree\nfour\n\n```\n<p>code</p>\n```"


def test_unicode_is_composed_and_emoji_stay_whole() -> None:
    assert unicode_form("e\u0301te\u0301") == "\u00e9t\u00e9"
    for kept in ("\U0001f468\u200d\U0001f469\u200d\U0001f467", "\u2764\ufe0f", "ＡＢＣ", "naïve café", "ﬁ"):
        assert unicode_form(kept) is None
    assert isinstance(unicode_form("caf\ufffd"), Drop)


@pytest.mark.parametrize("right", ["naïve café", "It’s “fine” – really", "退款 für €5", "señor ñandú", "Größe 🙂"])
@pytest.mark.parametrize("times", [1, 2])
def test_mojibake_is_mended(right: str, times: int) -> None:
    """python-ftfy: UTF-8 that was read as cp1252, once or twice."""
    wrong = right
    for _ in range(times):
        wrong = "".join(bytes([b]).decode("cp1252", "ignore") or chr(b) for b in wrong.encode())
    assert wrong != right
    assert unicode_form(wrong) == right


@given(st.text(max_size=60))
def test_right_text_is_never_mended_into_another(given: str) -> None:
    """Only text that is wholly the cp1252 reading of UTF-8 changes, and then into that."""
    mended = mend(given)
    if mended != given:
        assert given.isascii() is False
        assert len(mended) < len(given)


PERSONAL = [
    ("write to jo.doe+shop@mail.example.com now", "write to <EMAIL> now"),
    ("card 4111 1111 1111 1111, mail a@b.de", "card <CARD>, mail <EMAIL>"),
    ("身份证11010519491231002X。", "身份证<CN_ID>。"),
    ("from 8.8.8.8 to 192.168.0.1", "from <IP> to 192.168.0.1"),
    ("call +49 30 901820 or (415) 555-2671 or 13800138000", "call <PHONE> or <PHONE> or <PHONE>"),
]
NOT_PERSONAL = [
    "order 4111111111111112", "version 1.2.3.4567", "the year 2024-2025", "3.14159265358979", "@user hello",
    "355909190063-746", "4.2935472605893", "$<<6000-600-150-1200-2000=2050>>", "11010519491231002Y",
    "0000 0000 0000 0000", "sum 1234567890123456", "a@b", "300.300.300.300",
]  # fmt: skip


@pytest.mark.parametrize(("given", "masked"), PERSONAL)
def test_personal_data_is_masked_by_kind(given: str, masked: str) -> None:
    assert personal_data(given) == masked
    assert personal_data(masked) is None


@pytest.mark.parametrize("given", NOT_PERSONAL)
def test_what_only_looks_like_personal_data_stays(given: str) -> None:
    assert personal_data(given) is None


def test_kinds_of_personal_data_can_be_chosen() -> None:
    assert personal_data("a@b.de +49 30 901820", kinds="email") == "<EMAIL> +49 30 901820"
    with pytest.raises(BadSpec, match="no 'mail'"):
        personal_data("text", kinds="email,mail")


@pytest.mark.parametrize(
    "secret",
    [
        "-----BEGIN RSA PRIVATE KEY-----", "AKIA" + "Q" * 16, "ghp_" + "a1" * 18, "sk-proj-" + "x" * 40,
        "postgres://refit:hunter22@db.example.com/x", "AIza" + "b" * 35, "xoxb-1234567890-abc",
    ],
)  # fmt: skip
def test_a_secret_goes_and_is_shown_nowhere(secret: str) -> None:
    verdict = secrets(f"my key is {secret} please help")
    assert isinstance(verdict, Drop)
    assert verdict.withheld
    assert secret not in verdict.why


@pytest.mark.parametrize("text", ["risk-free", "task-" + "a" * 40, "https://example.com/a:b@c", "AKIA", "a key"])
def test_what_is_no_secret_stays(text: str) -> None:
    assert secrets(text) is None


def test_lines_that_come_again_are_counted() -> None:
    footer = "Subscribe to our newsletter now\nAll rights are reserved by us\n"
    assert isinstance(repeated_lines(footer * 3), Drop)
    assert isinstance(repeated_lines("今天天气很好我们去公园\n" * 6), Drop)
    assert repeated_lines("if (x) {\n  y();\n}\n" * 5) is None, "code repeats its braces"
    assert repeated_lines("| ---- | ---- |\n" * 6) is None
    assert repeated_lines("a\n\n\n\n\n\na") is None
    assert repeated_lines("\n".join(f"line {n}" for n in range(20))) is None


WORDS = st.sampled_from(
    [
        "a",
        "b",
        "A",
        "_",
        "a_b",
        "x1",
        "。",
        "退款",
        "こん",
        "한국어",
        "е\u0301",
        "é",
        "²",
        "〰",
        "\U0001f600",
        "々",
        "￿",
        "\u0300",
    ]
)


@settings(deadline=None)  # the first one waits for the kernel
@given(
    texts=st.lists(st.lists(st.one_of(WORDS, st.characters(codec="utf-8")), max_size=40), max_size=4),
    glue=st.sampled_from(["", " ", "\n", "-"]),
    twice=st.booleans(),
)
def test_what_the_sieve_lets_pass_the_rule_keeps(texts: list[list[str]], glue: str, twice: bool) -> None:
    said = [glue.join(words * (1 + twice)) for words in texts]
    (step,) = rules.build([Rule(name="repeats", args={"n": 3, "max_share": 0.0, "min_words": 1})])
    assert step.clear is not None
    for text, clear in zip(said, step.clear(Texts.of(said)), strict=True):
        assert step.apply(text) is None or not clear, text


def test_the_sieve_spares_most_texts_in_either_script() -> None:
    (step,) = rules.build([Rule(name="repeats")])
    assert step.clear is not None
    chinese = "".join(chr(0x4E00 + n) for n in range(300))
    said = [
        " ".join(f"word{n}" for n in range(200)),
        f"{chinese}。（{chinese[:3]}）ＡＢＣ",
        "buy now and save money " * 20,
    ]
    assert step.clear(Texts.of(said)).tolist() == [True, True, False]


def test_a_sieve_takes_what_its_rule_takes() -> None:
    with pytest.raises(TypeError, match="sieve of length: expected"):
        rules.sieve_of(length)(lambda texts, *, min_chars: texts)
