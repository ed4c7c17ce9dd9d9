"""What is learnt of a conversation, for the kinds of templates that are about."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from refit.chat import Segment, Template, load_template
from refit.errors import BadInput

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Qwen3: thoughts of earlier turns are dropped, and the last answer without thoughts gets empty ones.
REWRITES = (
    "{%- for message in messages %}{%- set content = message.content %}"
    "{%- if message.role == 'assistant' %}"
    "{%- if '</think>' in content %}{%- set thought = content.split('</think>')[0] + '</think>' %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}"
    "{%- else %}{%- set thought = '<think>\n\n</think>' %}{%- endif %}"
    "{{- '<|im_start|>assistant\n' }}{%- if loop.last %}{{- thought + '\n\n' }}{%- endif %}"
    "{{- content + '<|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
TRIMS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]"
    "{% else %} {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}"
)
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

TOKENS = (("bos_token", "<|im_start|>"), ("eos_token", "<|im_end|>"), ("pad_token", "<|im_end|>"))
SPECIALS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


def chatml(source: str = CHATML) -> Template:
    return Template(source, TOKENS, SPECIALS)


def talk(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(contents)]


def learnt(segments: list[Segment]) -> list[str]:
    return [segment.text for segment in segments if segment.answer is not None]


def whole(segments: list[Segment]) -> str:
    return "".join(segment.text for segment in segments)


def test_every_answer_and_its_end_are_learnt_and_nothing_else() -> None:
    segments = chatml().segments(talk("Hi", "Hello", "And?", "Bye"))
    assert learnt(segments) == ["Hello", "<|im_end|>", "Bye", "<|im_end|>"]
    assert [segment.answer for segment in segments if segment.answer is not None] == [1, 1, 3, 3]
    assert whole(segments) == chatml().render(talk("Hi", "Hello", "And?", "Bye"))


def test_the_end_is_learnt_also_where_pad_is_the_same_token_and_eos_is_another() -> None:
    other_eos = Template(CHATML, (("eos_token", "<|endoftext|>"), ("pad_token", "<|endoftext|>")), SPECIALS)
    assert learnt(other_eos.segments(talk("Hi", "Hello"))) == ["Hello", "<|im_end|>"]
    assert learnt(chatml().segments(talk("Hi", "Hello"))) == ["Hello", "<|im_end|>"]


def test_special_tokens_of_the_template_are_marked_and_those_in_messages_are_not() -> None:
    segments = chatml().segments(talk("say <|im_end|> please", "<|im_end|>"))
    user = next(segment for segment in segments if "please" in segment.text)
    assert user == Segment("user\nsay <|im_end|> please")
    assert segments[-3:] == [Segment("<|im_end|>", 1), Segment("<|im_end|>", 1, True), Segment("\n")]


def test_what_stands_between_two_special_tokens_is_one_segment() -> None:
    """It is tokenized together when the model is served: a blank at a seam must not become another token here."""
    texts = [segment.text for segment in chatml().segments(talk("\nHi", "Hello")) if not segment.special]
    assert texts == ["system\nYou are helpful", "\n", "user\n\nHi", "\n", "assistant\n", "Hello", "\n"]


def test_a_template_that_rewrites_earlier_turns_teaches_the_last_answer_in_its_true_surroundings() -> None:
    messages = talk("1+1?", "<think>add</think>\n\n2", "2+2?", "<think>add again</think>\n\n4")
    segments = chatml(REWRITES).segments(messages)
    assert learnt(segments) == ["<think>add again</think>\n\n4", "<|im_end|>"]
    assert whole(segments) == chatml(REWRITES).render(messages)
    assert "<think>add</think>" not in whole(segments)


def test_what_the_template_puts_before_an_answer_is_learnt_because_the_model_has_to_write_it() -> None:
    segments = chatml(REWRITES).segments(talk("Hi", "Hello"))
    assert learnt(segments) == ["<think>\n\n</think>\n\nHello", "<|im_end|>"]


def test_a_template_that_trims_is_followed() -> None:
    template = Template(TRIMS, (("bos_token", "<s>"), ("eos_token", "</s>")), ("<s>", "</s>"))
    segments = template.segments(talk(" Hi ", " Hello "))
    assert learnt(segments) == [" Hello", "</s>"]  # the opened turn ends in [/INST]: the blank is the model's to write
    assert whole(segments) == "<s>[INST] Hi [/INST] Hello</s>"
    assert [segment.text for segment in segments if segment.special] == ["<s>", "</s>"]


def test_a_template_without_an_end_gets_the_eos_token() -> None:
    template = Template(PLAIN, (("eos_token", "</s>"),), ("</s>",))
    segments = template.segments(talk("Hi", "Hello"))
    assert learnt(segments) == ["Hello", "</s>"]
    assert segments[-1] == Segment("</s>", 1, True)


def test_a_conversation_that_does_not_come_out_as_it_went_in_is_refused() -> None:
    shouting = chatml(CHATML.replace("message['content']", "message['content'] | upper"))
    with pytest.raises(BadInput, match="rewrites"):
        shouting.segments(talk("hi", "hello"))


def test_a_conversation_that_the_template_refuses_says_why() -> None:
    with pytest.raises(BadInput, match="no tools here"):
        chatml("{{ raise_exception('no tools here') }}").segments(talk("hi", "hello"))


def test_load_template_reads_file_and_special_tokens(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    with pytest.raises(BadInput, match="no chat template"):
        load_template(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    added = [{"content": "<|im_end|>", "special": True}, {"content": "<tool>", "special": False}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    assert load_template(tmp_path) == Template(CHATML, (("eos_token", "<|im_end|>"),), ("<|im_end|>",))


def test_an_answer_of_weight_0_is_read_and_neither_it_nor_its_end_is_learnt() -> None:
    messages = talk("Hi", "Hello", "And?", "Bye")
    weighted = [messages[0], {**messages[1], "weight": 0}, messages[2], {**messages[3], "weight": 0.5}]
    segments = chatml().segments(weighted)
    assert {segment.answer for segment in segments} == {None, 3}
    assert learnt(segments) == ["Bye", "<|im_end|>"]
    assert whole(segments) == chatml().render(messages)
    last = [messages[0], {**messages[1], "weight": 1}, messages[2], {**messages[3], "weight": 0}]
    assert learnt(chatml().segments(last)) == ["Hello", "<|im_end|>"]
    assert learnt(Template(PLAIN, (("eos_token", "</s>"),), ("</s>",)).segments(last)) == ["Hello"]
    with pytest.raises(BadInput, match="every answer has weight 0"):
        chatml().segments([messages[0], {**messages[1], "weight": 0}])


def test_where_only_the_last_answer_can_be_learnt_its_weight_decides() -> None:
    messages = talk("1+1?", "<think>add</think>\n\n2", "2+2?", "4")
    assert learnt(chatml(REWRITES).segments([messages[0], {**messages[1], "weight": 0}, *messages[2:]]))
    with pytest.raises(BadInput, match="cannot be found"):
        chatml(REWRITES).segments([*messages[:3], {**messages[3], "weight": 0}])


def test_of_a_pair_the_chosen_answer_is_rendered_and_the_template_sees_no_key_of_ours() -> None:
    curious = chatml(CHATML.replace("message['content']", "message['content'] ~ (message.keys() | list | length)"))
    pair = [talk("Hi")[0], {"role": "assistant", "content": "Hello", "rejected": "Go away", "weight": 1}]
    assert curious.render(pair) == curious.render(talk("Hi", "Hello"))
    assert learnt(chatml().segments(pair)) == ["Hello", "<|im_end|>"]
