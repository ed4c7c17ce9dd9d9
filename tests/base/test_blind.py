"""A template is planned once for a row of roles only where it is proved to look at no content."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refit.chat import Segment, Template, _blind
from tests.base.test_chat import CHATML, PLAIN, REWRITES, SPECIALS, TOKENS, TRIMS, chatml, talk

SYSTEM_FIRST = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0]['content'] + '\n' %}"
    "{% set turns = messages[1:] %}"
    "{% else %}{% set system = '' + messages[0]['content'] %}{% set turns = messages %}{% endif %}"
    "{% for message in turns if message.role != 'tool' %}{% if loop.first and message.content is string %}{{ system }}"
    "{% endif %}{{ bos_token ~ message.role ~ ': ' ~ message.content }}<|im_end|>\n{% endfor %}"
)
THINKS = CHATML.replace("+ message['content']", "+ ('<think>\n\n' if loop.last else '') + message['content']")

LLAMA = (
    "{% for message in messages %}"
    "{% set content = '<|im_start|>' + message['role'] + '\n\n' + message['content'] | trim + '<|im_end|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
)
BLIND = {
    "llama": LLAMA,
    "trims": TRIMS,
    "chatml": CHATML,
    "plain": PLAIN,
    "system first": SYSTEM_FIRST,
    "thinks": THINKS,
}
SEES = {
    "filters": CHATML.replace("message['content']", "message['content'] | upper"),
    "trims letters": "{% for m in messages %}{{ m.content | trim('a') }}{% endfor %}",
    "trims what is joined": "{% for m in messages %}{{ (' ' + m.content) | trim }}{% endfor %}",
    "rewrites": REWRITES,
    "compares": "{% for m in messages %}{% if 'a' in m.content %}x{% endif %}{{ m.content }}{% endfor %}",
    "asks whether it is empty": "{% for m in messages %}{{ m.content or 'nothing' }}{% endfor %}",
    "calls a method": "{% for m in messages %}{{ m.get('content').upper() }}{% endfor %}",
    "calls a method by item": "{% for m in messages %}{{ m['values']() | list }}{% endfor %}",
    "shows the message": "{% for m in messages %}{{ m }}{% endfor %}",
    "measures": "{{ messages | tojson | length }}",
    "measures a content": "{% for m in messages %}{{ m.content | length }}{% endfor %}",
    "slices": "{% for m in messages %}{{ m.content[1:] }}{% endfor %}",
    "repeats": "{% for m in messages %}{{ m.content * 2 }}{% endfor %}",
    "remembers": "{% set n = namespace(a='') %}{% for m in messages %}{% set n.a = m.content %}{% endfor %}{{ n.a }}",
    "by a macro": "{% macro loud(t) %}{{ t | upper }}{% endmacro %}{{ loud(messages[0].content) }}",
    "by a block's text": "{% set t %}{{ messages[0].content }}{% endset %}{{ t | upper }}",
    "by a filter block": "{% filter upper %}{{ messages[0].content }}{% endfilter %}",
    "by another name": "{% set t = messages[0].content %}{% if t == 'x' %}y{% endif %}",
    "by two things of one name": "{% set t = 'x' %}{{ t | upper }}{% set t = messages[0].content %}{{ t }}",
    "by its neighbours": "{% for m in messages %}{{ loop.previtem }}{% endfor %}",
    "by a loop of another name": "{% for m in messages %}{% set l = loop %}{{ l.previtem }}{% endfor %}",
    "by the clock": "{{ strftime_now('%d') }}{% for m in messages %}{{ m.content }}{% endfor %}",
    "by attribute filters": "{{ messages | map(attribute='content') | join | upper }}",
}  # fmt: skip


@pytest.mark.parametrize("name", BLIND)
def test_templates_that_only_write_contents_are_blind(name: str) -> None:
    assert _blind(BLIND[name])


@pytest.mark.parametrize("name", SEES)
def test_templates_that_could_look_at_a_content_are_not(name: str) -> None:
    assert not _blind(SEES[name])
    assert chatml(SEES[name]).plan(("user", "assistant")) is None


CONTENTS = st.text(min_size=1, max_size=20).filter(lambda text: "\ue000" not in text and text.strip() != "")


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(BLIND)), st.lists(CONTENTS, min_size=1, max_size=3), st.booleans())
def test_a_plan_says_what_rendering_says(name: str, contents: list[str], system: bool) -> None:
    template = Template(BLIND[name], TOKENS, SPECIALS)
    messages = talk(*contents, *contents[::-1])
    if system:
        messages = [{"role": "system", "content": contents[0]}, *messages]
    plan = template.plan(tuple(message["role"] for message in messages))
    assert plan is not None
    said = [message["content"] for message in messages]
    said += [text.strip() for text in said]
    written = [
        Segment(
            "".join(said[part] if isinstance(part, int) else part for part in stretch.parts),
            stretch.answer,
            stretch.special,
        )
        for stretch in plan
    ]
    assert written == template.segments(messages)
    if name != "plain":  # that one gets an end which the template does not write
        assert "".join(segment.text for segment in written) == template.render(messages)


def test_a_role_that_the_template_refuses_has_no_plan_and_rendering_says_why() -> None:
    refuses = chatml("{% if messages[0].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}" + CHATML)
    assert refuses.plan(("tool", "assistant")) is None
    assert refuses.plan(("user", "assistant"))
