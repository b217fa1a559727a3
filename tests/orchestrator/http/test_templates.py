"""Chat templates come out as transformers renders them; what they refuse, and what they cannot do, is the caller's."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from orchestrator.http.templates import ChatTemplate, TemplateInvalid
from specwire.core.sampling import InvalidParameter

TALK = [
    {"role": "system", "content": 'be <brief> & "kind"'},
    {"role": "user", "content": "hé\nllo"},
    {"role": "assistant", "content": "hi"},
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = """{% for message in messages %}
    {% if loop.index0 > 10 %}{% break %}{% endif %}
<|im_start|>{{ message['role'] }}
{{ message['content'] | trim }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA = """{{- bos_token }}{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% endif %}
{%- for message in messages if message.role != 'system' -%}
    {{ '[INST] ' + message.content + ' [/INST]' if message.role == 'user' else message.content + eos_token }}
{%- endfor %}{{ messages | tojson(indent=2) }}{{ tools is none }}{{ extra | default('no') }}"""
MARKED = """{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}
{% else %}{{ m.content }}{% endif %}{% endfor %}"""


@pytest.mark.parametrize("source", [CHATML, LLAMA, MARKED], ids=["chatml", "llama", "marked"])
@pytest.mark.parametrize("asking", [True, False])
def test_as_transformers_renders_them(source: str, asking: bool) -> None:
    more: dict[str, Any] = {"extra": 5}
    values: dict[str, Any] = {**TOKENS, **more}
    theirs = render_jinja_template([TALK], chat_template=source, add_generation_prompt=asking, **values)
    assert ChatTemplate(source, TOKENS).render(TALK, asking, more) == next(iter(theirs))[0]


def test_the_day_is_todays() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}", {}).render(TALK, True, {}).isdigit()


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[7].content.x }}",
        "{{ 1 // 0 }}",
        "{{ ''.__class__.__mro__ }}{{ messages.append(1) }}",
        "{{ messages.append(1) }}",
    ],
)
def test_what_it_cannot_render_is_the_callers(source: str) -> None:
    with pytest.raises(InvalidParameter, match="^messages: the chat template"):
        ChatTemplate(source, {}).render(TALK, True, {})


def test_a_template_that_does_not_compile() -> None:
    with pytest.raises(TemplateInvalid, match="line 2"):
        ChatTemplate("\n{% if %}", {})
