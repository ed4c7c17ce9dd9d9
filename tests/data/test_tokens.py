"""A fast tokenizer says what Hugging Face's says or is not used, and what is learnt of many conversations at once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from corpus import gate, torture
from corpus.bpe import Fast, Ids, Reference, Unsupported, _numeral
from corpus.gate import Gated
from corpus.tokens import NOTHING, Encoder
from refit.chat import Segment

QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
REWRITES = (
    "{%- for m in messages %}{%- set content = m.content %}"
    "{%- if m.role == 'assistant' and '</think>' in content and not loop.last %}"
    "{%- set content = content.split('</think>')[-1] %}{%- endif %}"
    "{{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content | trim + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Change = Callable[[dict[str, Any]], None]


def single_digits(config: dict[str, Any]) -> None:
    """As SmolLM2 and the demos' tiny model."""
    digits = {"type": "Digits", "individual_digits": True}
    config["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, config["pre_tokenizer"]]}


def qwen(config: dict[str, Any]) -> None:
    split = {"type": "Split", "pattern": {"Regex": QWEN}, "behavior": "Isolated", "invert": False}
    bytes_ = {**config["pre_tokenizer"], "use_regex": False}
    config["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, bytes_]}
    config["normalizer"] = {"type": "NFC"}


def without_some_bytes(config: dict[str, Any]) -> None:
    """As SmolLM2's, which has no token for some control characters."""
    for letter in ("\u0100", "\u0104", "\u0106", "ó", "Ń"):
        if letter in config["model"]["vocab"] and not any(letter in merge for merge in config["model"]["merges"]):
            del config["model"]["vocab"][letter]


def plain_added_token(config: dict[str, Any]) -> None:
    token = {**config["added_tokens"][0], "id": 900, "content": "<tool_call>", "special": False}
    config["added_tokens"].append(token)


def as_it_is(config: dict[str, Any]) -> None:
    return


KINDS: list[Change] = [as_it_is, single_digits, qwen, without_some_bytes, plain_added_token]


def changed(tokenizer: Path, change: Change) -> str:
    config = json.loads((tokenizer / "tokenizer.json").read_text())
    change(config)
    return json.dumps(config)


@pytest.fixture(scope="module", params=KINDS, ids=lambda change: change.__name__)
def both(request: pytest.FixtureRequest, tokenizer: Path) -> tuple[Reference, Fast]:
    source = changed(tokenizer, request.param)
    reference = Reference(source)
    return reference, Fast(source, reference)


def lists(ids: Ids) -> list[list[int]]:
    return [part.tolist() for part in np.split(ids.tokens, ids.offsets[1:-1])]


def test_the_fast_tokenizer_says_what_hugging_face_says_of_every_torture(both: tuple[Reference, Fast]) -> None:
    reference, fast = both
    texts = torture.texts(reference.added)
    wrong = [t for t, a, b in zip(texts, lists(fast(texts)), lists(reference(texts)), strict=True) if a != b]
    assert wrong == []


@settings(max_examples=150, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=60), min_size=1, max_size=8))
def test_the_fast_tokenizer_says_what_hugging_face_says_of_any_text(
    both: tuple[Reference, Fast], texts: list[str]
) -> None:
    reference, fast = both
    assert lists(fast(texts)) == lists(reference(texts))


@pytest.mark.parametrize("name", ["tiny-seed", "smollm2-135m-instruct"])
def test_the_demos_tokenizers_are_read_fast(name: str) -> None:
    file = Path(os.environ.get("REFIT_CACHE") or Path.home() / ".cache/refit") / "models" / name / "tokenizer.json"
    if not file.is_file():
        pytest.skip(f"{file} is not there: `make setup` makes it")
    gated, reference = Gated(file), Reference(file.read_text())
    texts = torture.texts(reference.added)
    texts *= 1 + gate.SAMPLE // len(texts)
    assert lists(gated(texts)) == lists(reference(texts))
    assert gated.name.startswith("gigatoken ")


def test_a_numeral_is_what_hugging_face_splits_off() -> None:
    numerals = [chr(point) for point in np.flatnonzero(_numeral())]
    others = [chr(point) for point in range(0x3000) if not _numeral()[point]]
    split = pre_tokenizers.Digits(individual_digits=True).pre_tokenize_str
    assert [piece for piece, _ in split("".join(numerals))] == numerals
    assert len(split("".join(others))) == 1


def word_piece() -> Tokenizer:
    return Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))


def unigram() -> Tokenizer:
    return Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("b", -2.0)], 0, False))


@pytest.mark.parametrize("make", [word_piece, unigram])
def test_a_tokenizer_of_another_kind_is_left_to_hugging_face(
    make: Callable[[], Tokenizer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make().save(str(tmp_path / "tokenizer.json"))
    gated = Gated(tmp_path / "tokenizer.json")
    texts = ["a", "b", "ab"] * gate.SAMPLE
    assert gated(texts)[0].tolist() == Reference((tmp_path / "tokenizer.json").read_text())(texts)[0].tolist()
    assert gated.name.startswith("tokenizers ")
    assert "not byte-level BPE" in capsys.readouterr().err


class Tampered(Fast):
    """Wrong in one letter."""

    letter = "ſ"

    def __call__(self, texts: Any) -> Ids:
        return super().__call__([text.replace(self.letter, "s") for text in texts])


class WrongInSnowmen(Tampered):
    letter = "☃"


@pytest.mark.parametrize("wrong", [Tampered, WrongInSnowmen])
def test_one_difference_in_the_torture_or_in_the_sample_and_hugging_face_does_it(
    wrong: type[Fast], tokenizer: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gate, "Fast", wrong)
    gated = Gated(tokenizer / "tokenizer.json")
    texts = ["red lamp ☃"] * (gate.SAMPLE + 1)
    assert lists(gated(texts)) == lists(Reference((tokenizer / "tokenizer.json").read_text())(texts))
    assert gated.name.startswith("tokenizers ")
    told = capsys.readouterr().err
    assert told.count("fast_tokenizer_not_used") == 1
    assert ("in=torture" if wrong is Tampered else "in=sample") in told
    assert "lamp" not in told  # what records say is no log's business


def test_a_tokenizer_that_asks_for_what_the_fast_one_does_not_do_is_refused(tokenizer: Path) -> None:
    def prefixed(config: dict[str, Any]) -> None:
        config["pre_tokenizer"]["add_prefix_space"] = True

    source = changed(tokenizer, prefixed)
    with pytest.raises(Unsupported, match="not cut for byte-level"):
        Fast(source, Reference(source))


def talk(*contents: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(contents)]


def weighed(messages: list[dict[str, Any]], *weights: float | None) -> list[dict[str, Any]]:
    return [
        message if weight is None else {**message, "weight": weight}
        for message, weight in zip(messages, weights, strict=True)
    ]


def folder(tokenizer: Path, tmp_path: Path, template: str) -> Path:
    for file in tokenizer.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(template)
    return tmp_path


def one_by_one(
    encoder: Encoder, segments: list[Segment], messages: list[dict[str, Any]]
) -> tuple[list[int], list[int]]:
    """The plain twin: each segment by itself, special tokens by their id."""
    ids: list[int] = []
    mask: list[int] = []
    for segment in segments:
        known = encoder._whole.token_to_id(segment.text)
        more = [known] if segment.special else encoder._plain([segment.text])[0].tolist()
        ids += more
        weight = 0 if segment.answer is None else messages[segment.answer].get("weight", 1)
        mask += [max(1, round(weight * 255)) if weight else 0] * len(more)
    return ids, [0, *mask[1:]]


def conversations() -> list[list[dict[str, Any]]]:
    """Enough for the fast tokenizer, of several shapes, with some that cannot be learnt from."""
    texts = [text for text in torture.texts(["<|im_end|>", "<|endoftext|>"]) if "\ue000" not in text]
    made: list[list[dict[str, Any]]] = []
    for at, text in enumerate(texts):
        made.append(talk(text, texts[-at]))
        made.append([{"role": "system", "content": "Be kind."}, *talk(text, "yes", "and?", text)])
        made.append([{"role": "text", "content": text}])
        made.append(weighed(talk(text, "yes", "and?", text), None, at % 5 / 4, None, (at % 3 + 1) / 3))
        if at % 7 == 0:
            made += [talk(text), [{"role": "user", "content": text, "name": "eva"}, *talk("", text)[1:]]]
    return made


@pytest.mark.parametrize("template", [None, REWRITES, THINKS, TRIMS])
def test_many_conversations_at_once_are_what_each_is_by_itself(
    template: str | None, tokenizer: Path, tmp_path: Path
) -> None:
    source = (tokenizer / "chat_template.jinja").read_text()
    encoder = Encoder(folder(tokenizer, tmp_path, template or source))
    talks = conversations()
    encoded = encoder.encode(talks)
    assert encoder.tokenized_by.startswith("gigatoken ")
    refused = dict(encoded.refused)
    assert len(encoded.tokens) == len(encoded.mask) == encoded.lengths.sum()
    ends = np.cumsum(encoded.lengths)
    for at, messages in enumerate(talks):
        first, last = ends[at] - encoded.lengths[at], ends[at]
        if messages[0]["role"] == "text":
            segments = [Segment(messages[0]["content"], 0), Segment("<|im_end|>", 0, True)]
        else:
            segments = encoder.template.segments(messages)
        ids, mask = one_by_one(encoder, segments, messages)
        assert refused.get(at) == (None if any(mask) else NOTHING)
        if any(mask):
            assert encoded.tokens[first:last].tolist() == ids
            assert encoded.mask[first:last].tolist() == mask
        else:
            assert first == last


def test_a_messages_weight_is_that_of_every_token_of_its_answer_and_of_its_end(tokenizer: Path) -> None:
    encoder = Encoder(tokenizer)
    said = talk("a", "red lamp", "b", "blue lamp", "c", "green lamp", "d", "late", "e", "happy")
    weights = [None, 0, None, 0.5, None, 0.001, None, 1, None, None]
    named = [{**message, "name": "eva"} for message in said]  # rendered one by one
    for messages in (weighed(said, *weights), weighed(named, *weights)):
        encoded = encoder.encode([messages])
        found = {
            mask: encoder._whole.decode(encoded.tokens[encoded.mask == mask].tolist(), skip_special_tokens=False)
            for mask in np.unique(encoded.mask[encoded.mask > 0]).tolist()
        }
        assert found == {
            128: "blue lamp<|im_end|>", 1: "green lamp<|im_end|>", 255: "late<|im_end|>happy<|im_end|>"
        }  # fmt: skip


def test_a_weight_changes_no_token_and_a_text_has_one_too(tokenizer: Path) -> None:
    encoder = Encoder(tokenizer)
    said = [talk("a", "red lamp"), [{"role": "text", "content": "blue lamp"}]]
    plain, half = encoder.encode(said), encoder.encode([weighed(one, *[0.5] * len(one)) for one in said])
    assert half.tokens.tolist() == plain.tokens.tolist()
    assert half.mask.tolist() == np.where(plain.mask == 255, 128, 0).tolist()
    assert encoder.encode([weighed(said[1], 0)]).refused == [(0, NOTHING)]


def test_no_conversation_is_no_tokens(tokenizer: Path) -> None:
    encoded = Encoder(tokenizer).encode([])
    assert (len(encoded.tokens), len(encoded.mask), len(encoded.lengths), encoded.refused) == (0, 0, 0, [])


def test_what_cannot_be_learnt_from_is_refused_with_its_reason_and_its_neighbours_are_not(tokenizer: Path) -> None:
    encoded = Encoder(tokenizer).encode([talk("a", "b"), talk("only asked"), talk("c", "d")])
    assert encoded.refused == [(1, NOTHING)]
    assert encoded.lengths.tolist()[1] == 0
    assert encoded.lengths.sum() == len(encoded.tokens)


def test_a_special_token_that_the_tokenizer_lacks_is_a_reason(tokenizer: Path, tmp_path: Path) -> None:
    made = folder(tokenizer, tmp_path, "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}")
    (made / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    ((number, reason),) = Encoder(made).encode([talk("a", "b")]).refused
    assert number == 0
    assert "a special token that the tokenizer does not have" in reason


def test_a_token_that_spans_the_thoughts_and_the_blank_lines_is_learnt_whole(tmp_path: Path) -> None:
    """`<think>\\n\\n` in one token: a mask by the length of a tokenized prefix would cut it in two."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|im_start|>", "<|im_end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    made.train_from_iterator(["<think>\n\n"] * 9, trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (tmp_path / "chat_template.jinja").write_text(THINKS)
    encoder = Encoder(tmp_path)
    encoded = encoder.encode([talk("hi", "late")])
    whole = made.encode("<think>\n\n").ids
    assert len(whole) == 1
    learnt = encoded.tokens[encoded.mask > 0].tolist()
    assert learnt[0] == whole[0]
    assert made.decode(learnt, skip_special_tokens=False) == "<think>\n\nlate<|im_end|>"
