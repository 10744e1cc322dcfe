"""A template's frame is used again only if the template does nothing with texts but write them."""

from types import SimpleNamespace

import pytest

from packhorse.chat import ChatProcessor
from packhorse.count.programs import find_frame, sentinel

TURNS = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": sentinel(0)}]},
    {"role": "assistant", "content": [{"type": "text", "text": sentinel(1)}]},
]
LOOP = (
    "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}"
    "{% if p.type == 'image' %}<i>{% else %}BODY{% endif %}{% endfor %}</>{% endfor %}"
)


def frame(template: str, turns=TURNS):
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(asked, **_):
        return render_jinja_template([asked], chat_template=template, add_generation_prompt=False)[0][0]

    tokenizer = SimpleNamespace(special_tokens_map={})
    made = SimpleNamespace(chat_template=template, tokenizer=tokenizer, apply_chat_template=render)
    return find_frame(ChatProcessor(made), turns, 2)


@pytest.mark.parametrize(
    "body",
    [
        "{{ p.text }}",
        "{{ p['text'] }}",
        "{{ '[' + p.text + ']' }}",
        "{% if p.text %}{{ p.text }}{% endif %}",
        "{% if p.text is string %}{{ p.text }}{% endif %}",
        "{% set t = p.text %}{{ t }}",
        "{{ p.text | default('') }}",
        "{{ p.text | string }}",
        "{% if m.role in ['user', 'assistant'] and 'type' in p %}{{ p.text }}{% endif %}",
        "{% if tools %}{{ tools | tojson }}{% endif %}{{ p.text }}",
        "{% if m.content | length > 0 %}{{ p.text }}{% endif %}",
        "{% set t = '>' + p.text %}{{ t + '<' }}",
        "{% macro w(t) %}({{ t }}){% endmacro %}{{ w(p.text) }}",
    ],
)
def test_a_template_that_writes_texts_has_a_frame(body):
    found = frame(LOOP.replace("BODY", body))
    assert found is not None
    assert found.holes == (0, 1)
    assert sentinel(0).join([found.pieces[0], found.pieces[1]]) in found.text
    assert found.pieces[0].startswith("<user><i>")
    assert found.pieces[2].endswith("</>")


@pytest.mark.parametrize(
    "body",
    [
        "{{ p.text | trim }}",
        "{{ p.text.strip() }}",
        "{{ p.text | upper }}",
        "{{ p.text | tojson }}",
        "{{ p.text | e }}",
        "{{ p.text | wordcount }}{{ p.text }}",
        "{{ p.text | length }}{{ p.text }}",
        "{{ p.text[:5] }}{{ p.text }}",
        "{% if '</think>' in p.text %}T{% endif %}{{ p.text }}",
        "{% if p.text in 'yes no' %}T{% endif %}{{ p.text }}",
        "{% if p.text == 'yes' %}T{% endif %}{{ p.text }}",
        "{% if 'yes' == p.text %}T{% endif %}{{ p.text }}",
        "{% if p.text in ['yes', 'no'] %}T{% endif %}{{ p.text }}",
        "{% if p.text.startswith('x') %}T{% endif %}{{ p.text }}",
        "{% if p.text.split('</think>') | length > 1 %}T{% endif %}{{ p.text }}",
        "{% for c in p.text %}{{ c }}{% endfor %}",
        "{{ '%s' % p.text }}",
        "{{ '{}'.format(p.text) }}",
        "{% if '</think>' in (p.text ~ '') %}T{% endif %}{{ p.text }}",
        "{% if '</think>' in ['a', p.text] | join %}T{% endif %}{{ p.text }}",
        "{% set t = 'a' + p.text %}{% if '</think>' in t %}T{% endif %}{{ p.text }}",
        "{% macro w(t) %}({{ t }}){% endmacro %}{% if '</think>' in w(p.text) %}T{% endif %}{{ p.text }}",
        "{% set t %}{{ p.text }}{% endset %}{% if '</think>' in t %}T{% endif %}{{ p.text }}",
        "{% set w = 'stop please' %}{% if p.text in w %}T{% endif %}{{ p.text }}",
        "{% if p.text in 'a' + 'b' %}T{% endif %}{{ p.text }}",
        "{% if p.text is in('stop please') %}T{% endif %}{{ p.text }}",
        "{% if p.text is eq('stop') %}T{% endif %}{{ p.text }}",
        "{% if 'stop please'.startswith(p.text) %}T{% endif %}{{ p.text }}",
        "{% if p.text | tojson == '\"stop\"' %}T{% endif %}{{ p.text }}",
        "{% if m.content | string | length > 60 %}T{% endif %}{{ p.text }}",
        "{% if m | tojson | length > 60 %}T{% endif %}{{ p.text }}",
        "{% if 'a' | replace(p.text, '') %}T{% endif %}{{ p.text }}",
        "{% if '%s' % [p.text] == 'x' %}T{% endif %}{{ p.text }}",
        "{{ p.text }}{{ p.text }}",
        "{% if m.role == 'user' %}{{ p.text }}{% endif %}",
    ],
)
def test_a_template_that_looks_into_texts_or_changes_them_has_none(body):
    assert frame(LOOP.replace("BODY", body)) is None


def test_a_processor_without_a_single_template_has_none():
    tokenizer = SimpleNamespace(chat_template=None)
    made = SimpleNamespace(
        chat_template=None, tokenizer=tokenizer, apply_chat_template=lambda turns, **_: str(turns)
    )
    assert find_frame(ChatProcessor(made), TURNS, 2) is None
