"""Chat templates come out as transformers renders them; what they refuse, and what they cannot do, is the caller's."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from orchestrator.chat import templates
from orchestrator.chat.template_process import ChatTemplate
from orchestrator.chat.templates import RemoteTemplate, Renderer, TemplateInvalid
from specwire.core.invalid import InvalidParameter
from specwire.text.sandbox import Busy
from tests.orchestrator.http.front import CHAT, COMPLETIONS, Front, another
from tests.wait import LIMIT_S, until

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


def test_the_template_that_comes_along_is_chatml() -> None:
    """docs/HTTP.md names it."""
    source = (Path(__file__).resolve().parents[3] / "examples" / "chatml.jinja").read_text()
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\nthere"}]
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi\nthere<|im_end|>\n"
    assert ChatTemplate(source, {}).render(talk, False, {}) == expected
    assert ChatTemplate(source, {}).render(talk, True, {}) == expected + "<|im_start|>assistant\n"


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


# In processes of their own

HELLO = [{"role": "user", "content": "5"}]
# By what they do: each alone would hang the orchestrator, or take all of the machine's memory.
HOSTILE = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "words": "{{ lipsum(n=200000) }}",
    "multiplies": "{{ 'a' * 8000000000 }}",
    "multiplies what is said": "{{ messages[0].content * 8000000000 }}",
    "doubles": "{% set x = namespace(s='a' * 1000) %}{% for i in range(60) %}{% set x.s = x.s ~ x.s %}{% endfor %}",
    "lists": "{{ ([0] * 800000000) | length }}",
    "powers": "{{ messages | length * 9 ** 99999999 }}",
    "calls itself": "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "nests": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "nests blocks": "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    "pads": "{{ '%9999999999d' | format(1) }}",
    "writes long": "{% for i in range(17) %}{{ 'a' * 1048576 }}{% endfor %}",
    "writes half a character": "{{ '\\ud800' }}",
}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine says nothing about a template: what it takes by itself ends it, or the test does."""
    monkeypatch.setattr(templates, "LIMIT_S", LIMIT_S)


@pytest.fixture
async def renderer() -> AsyncIterator[Renderer]:
    renderer = Renderer()
    yield renderer
    await renderer.stop()


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
async def test_a_hostile_template_is_refused_and_others_are_rendered(source: str, renderer: Renderer) -> None:
    hostile, good = renderer.template(source, {}), renderer.template(CHATML, TOKENS)
    try:
        bad = asyncio.create_task(hostile.render(HELLO, True, {}))
        assert await good.render(TALK, True, {}) == ChatTemplate(CHATML, TOKENS).render(TALK, True, {})
        with pytest.raises((InvalidParameter, TemplateInvalid), match="the chat template "):
            await bad
        assert await good.render(HELLO, False, {}) == ChatTemplate(CHATML, TOKENS).render(HELLO, False, {})
    finally:
        hostile.close()
        good.close()


async def test_conversations_share_processes(renderer: Renderer) -> None:
    """The common case forks none; nor is one lost by what a template refuses."""
    template = renderer.template("{{ messages[0].content.x() if ask else messages[0].content }}", {})
    try:
        for _ in range(3):
            assert await template.render(HELLO, True, {}) == "5"
            with pytest.raises(InvalidParameter, match="cannot render them|refuses them"):
                await template.render(HELLO, True, {"ask": True})
        (process,) = template._idle
        texts = await asyncio.gather(*(template.render(HELLO, True, {}) for _ in range(20)))
        assert texts == ["5"] * 20
        assert process in template._idle
        assert len(template._idle) <= templates.AT_ONCE
    finally:
        template.close()


async def test_a_process_that_has_died_is_replaced(renderer: Renderer) -> None:
    template = renderer.template("{{ messages[0].content }}", {})
    try:
        assert await template.render(HELLO, True, {}) == "5"
        await asyncio.to_thread(renderer._forks.stop)
        (process,) = template._idle
        await until(lambda: process.gone)
        assert await template.render(HELLO, True, {}) == "5"
    finally:
        template.close()


async def test_where_to_fork_from_ends_between_two_chats(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins anew; where it does not stay, that is no mistake of the caller's, nor of the template's."""
    template = renderer.template("{{ messages[0].content }}", {})
    forks = renderer._forks
    try:
        for _ in range(2):
            assert await template.render(HELLO, True, {}) == "5"
            assert forks._control is not None
            forks._control.shutdown(socket.SHUT_RDWR)
            template.close()
            template = renderer.template("{{ messages[0].content }}", {})
        monkeypatch.setattr(forks, "_start", _nobodys)
        with pytest.raises(Busy, match="forked from is gone"):
            await template.render(HELLO, True, {})
        monkeypatch.setattr(forks, "connect", _nobodys)
        with pytest.raises(Busy, match="ended before it had forked one"):
            await template.render(HELLO, True, {})
    finally:
        template.close()


def _nobodys() -> socket.socket:
    """A connection whose other end is closed."""
    ours, theirs = socket.socketpair()
    theirs.close()
    return ours


async def test_a_template_is_compiled_at_start_however_busy_the_machine(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "LIMIT_S", 0.0)
    template = renderer.template("5", {})
    try:
        await template.compile()
        with pytest.raises(Busy, match="not rendered within 0 s"):
            await template.render(HELLO, True, {})
    finally:
        template.close()


async def test_who_leaves_has_nobody_elses_text(renderer: Renderer) -> None:
    template = renderer.template("{% for i in range(90000) %}{% endfor %}{{ messages[0].content }}", {})
    try:
        left = [asyncio.create_task(template.render([{"content": "left"}], True, {})) for _ in range(4)]
        await asyncio.sleep(0)
        for task in left[1:]:
            task.cancel()
        texts = await asyncio.gather(*(template.render([{"content": str(n)}], True, {}) for n in range(4)))
        assert texts == ["0", "1", "2", "3"]
        assert await left[0] == "left"
    finally:
        template.close()
        await asyncio.gather(*left, return_exceptions=True)


async def test_too_many_wait(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MOST_WAITING", 2)
    template = renderer.template("5", {})
    try:
        found = await asyncio.gather(*(template.render(HELLO, True, {}) for _ in range(3)), return_exceptions=True)
        assert [found[0], found[1]] == ["5", "5"]
        assert isinstance(found[2], Busy)
    finally:
        template.close()


def test_a_hostile_models_chats_are_refused_by_name(door: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that does not compile, or takes too much, is no failure of the server; the rest of it is served."""
    described = RemoteTemplate.__init__

    for source, said in (
        (HOSTILE["nests"], "cannot chat"),
        (HOSTILE["multiplies what is said"], "took more computing"),
    ):

        def replaced(template: RemoteTemplate, forks: Any, _: str, tokens: Any, source: str = source) -> None:
            described(template, forks, source, tokens)

        with another(door) as running:
            monkeypatch.setattr(RemoteTemplate, "__init__", replaced)  # behind the check of --chat-template
            answer = running.post(CHAT, messages=HELLO)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert error["param"] == "messages"
            assert "model 'scripted:7'" in error["message"]
            assert said in error["message"]
            assert running.post("/tokenize", messages=HELLO).status_code == 400
            assert running.done(COMPLETIONS, prompt=[5], max_tokens=2)["usage"]["completion_tokens"] == 2
            monkeypatch.undo()


def test_a_template_of_the_operators_that_does_not_compile(door: Front) -> None:
    with pytest.raises(TemplateInvalid, match="the chat template"), another(door, chat_template=HOSTILE["nests"]):
        pass
