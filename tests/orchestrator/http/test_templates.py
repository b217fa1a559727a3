"""Chats and their templates: rendered as transformers does; what they refuse or cannot do is the caller's."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from orchestrator.chat import templates
from orchestrator.chat.fields import Fields
from orchestrator.chat.talk import ToolUse, take_talk
from orchestrator.chat.template_process import ChatTemplate
from orchestrator.chat.templates import RemoteTemplate, TemplateInvalid, renderers
from specwire.core.invalid import InvalidParameter
from specwire.text.sandbox import Busy, ForkServer, readable
from specwire.text.tool_calls.formats import ChatFamily
from specwire.text.tool_calls.parser import OutputParser, gathered
from tests.orchestrator.http.front import CHAT, COMPLETIONS, Front, another
from tests.text.tokenizers_for_tests import byte_level
from tests.wait import LIMIT_S, until

# As the families' templates are made, each with what its own does: namespaces, loop controls, filters, calls as JSON,
# what marks the assistant's part for training.
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\nWrite <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' %}{%- set ns.last = (messages | length - 1) - loop.index0 %}{%- break %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = message.reasoning_content or '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and thought %}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}
        {%- generation %}{{- content }}{%- endgeneration %}
        {%- for call in message.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{%- endif %}
            {%- set call = call.function if call.function else call %}
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
LLAMA = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools is not none %}{{- 'Environment: ipython\\n' }}{%- endif %}
{{- system + '<|eot_id|>' }}
{%- if tools is not none and messages %}
    {%- set first = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
    {{- first + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
GEMMA = """{{ bos_token }}
{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
FAMILIES = {"qwen": QWEN, "llama": LLAMA, "gemma": GEMMA}
# It writes the arguments of calls as they are, and knows no tools beside them.
DEEPSEEK = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for tool in m['tool_calls'] or [] %}<｜tool▁call▁begin｜>"
    "{{ tool['function']['name'] + '<｜tool▁sep｜>' + tool['function']['arguments'] + '<｜tool▁call▁end｜>' }}"
    "{% endfor %}\n{% endfor %}"
)

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'Of a "city" <here>, in °C.',
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
USER = {"role": "user", "content": " How warm is it in Köln?\n"}
SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "It is <warm>. "}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call12345", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call12345", "content": "23"}
TALKS: dict[str, list[dict[str, Any]]] = {
    "one turn": [USER],
    "system": [SYSTEM, USER],
    "turns": [USER, ANSWER, USER],
    "calls": [USER, CALL, RESULT],
    "thought": [USER, {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nWarm."}],
}


def as_sent(message: dict[str, Any]) -> dict[str, Any]:
    """As OpenAI's clients send it: arguments as text, no content beside calls."""
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "content": None, "tool_calls": calls}


def ours(source: str, **body: Any) -> str:
    talk = take_talk(Fields({**body, "messages": [as_sent(each) for each in body["messages"]]}))
    messages, more = talk.told(ChatFamily.of(source))
    return talk.prompt(ChatTemplate(source, TOKENS).render(messages, talk.asks, more))


def theirs(source: str, talk: list[dict[str, Any]], **values: Any) -> str:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level(), bos_token="<s>", eos_token="</s>", chat_template=source
    )
    found = tokenizer.apply_chat_template(talk, tokenize=False, **values)
    assert isinstance(found, str)
    return found


# One family knows neither instructions nor calls.
CASES = [
    (family, talk) for family in FAMILIES for talk in TALKS if family != "gemma" or talk not in ("system", "calls")
]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_as_transformers_renders_them(family: str, name: str) -> None:
    source, talk = FAMILIES[family], TALKS[name]
    for tools in (None, TOOLS) if family != "gemma" else (None,):
        for asks in (False, True):
            expected = theirs(source, talk, tools=tools, add_generation_prompt=asks)
            assert ours(source, messages=talk, tools=tools, add_generation_prompt=asks) == expected
    assert ours(source, messages=talk) == theirs(source, talk, add_generation_prompt=True)


@pytest.mark.parametrize("content", ["It is warm", "It is warm ", "<s>It", "a\n"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_final_message_is_continued(family: str, content: str) -> None:
    talk = [USER, {"role": "assistant", "content": content}]
    expected = theirs(FAMILIES[family], talk, continue_final_message=True)
    assert ours(FAMILIES[family], messages=talk, continue_final_message=True) == expected


def test_values_for_the_template() -> None:
    more = {"enable_thinking": False}
    found = ours(QWEN, messages=[USER], chat_template_kwargs=more)
    assert found == theirs(QWEN, [USER], add_generation_prompt=True, **more)
    assert found.endswith("<think>\n\n</think>\n\n")


def test_a_template_that_knows_no_tools_is_told_in_words() -> None:
    text = ours(
        "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}", messages=[SYSTEM, USER, CALL], tools=TOOLS
    )
    assert text.startswith("system:Be brief.\n\nYou may call")
    assert json.dumps(TOOLS[0]["function"], ensure_ascii=False) in text
    assert text.endswith('assistant:[{"name": "weather", "arguments": {"city": "Köln"}}]\n')
    assert ours(GEMMA, messages=[USER], tools=TOOLS).startswith("<s>\n<start_of_turn>user\nYou may call")


@pytest.mark.parametrize("source", [QWEN, LLAMA, DEEPSEEK, DEEPSEEK + "{{ tools }}"])
def test_calls_in_the_history_stand_there_as_the_model_writes_them(source: str) -> None:
    functions = take_talk(Fields({"messages": [USER], "tools": TOOLS})).tools.functions
    form = ChatFamily.of(source).format
    text = ours(source, messages=[USER, CALL], tools=TOOLS, add_generation_prompt=False)
    at = next(text.rfind(mark) for mark in (form.opener, form.start, '{"name"') if mark and mark in text)
    parser = OutputParser(form, functions, None)
    (call,) = gathered([*parser.feed(text[at:]), *parser.finish()]).calls
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Köln"})


def test_with_choice_none_the_model_hears_of_no_tools() -> None:
    assert ours(QWEN, messages=[USER], tools=TOOLS, tool_choice="none") == ours(QWEN, messages=[USER])


def call_with(**function: object) -> list[dict[str, Any]]:
    return [USER, {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": function}]}]


def nested(depth: int) -> str:
    return '{"a": ' * depth + "1" + "}" * depth


# As an argument's value; three such are too much together.
PARTS = '{"a": [' + "[], " * 30_000 + "0]}"


def tool(**function: object) -> list[dict[str, Any]]:
    return [{"type": "function", "function": function}]


MISTAKEN: list[tuple[dict[str, Any], str]] = [
    ({"tools": "x"}, "tools: must be a list of tools, not 'x'"),
    ({"tools": [5]}, "tools: tools[0] must be an object, not 5"),
    ({"tools": [{"type": "custom"}]}, "tools: tools[0].type must be 'function', not 'custom'"),
    ({"tools": [{"type": "function"}]}, "tools: tools[0].function must be an object, not None"),
    ({"tools": tool(name="a b")}, "tools: tools[0].function.name must be"),
    ({"tools": tool(name="a", parameters=5)}, "tools: tools[0].function.parameters must be the JSON schema"),
    ({"tools": tool(name="a", parameters={"type": "string"})}, "must be the JSON schema of an object"),
    ({"tools": tool(name="a", parameters={"x-guidance": 5})}, "parameters.x-guidance must be an object"),
    ({"tools": tool(name="a", strict="yes")}, "tools: tools[0].function.strict must be true or false"),
    ({"tools": tool(name="a", description=5)}, "tools: tools[0].function.description must be a string"),
    ({"tools": [*tool(name="a"), *tool(name="a")]}, "tools: tools[1].function.name: 'a' stands there twice"),
    ({"tools": tool(name="a") * 129}, "tools: at most 128 are allowed, not 129"),
    ({"tool_choice": "required"}, "tool_choice: 'required' needs tools"),
    (
        {"tools": TOOLS, "tool_choice": "any"},
        "tool_choice: must be none, auto, required, a function by name or allowed_tools",
    ),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "b"}}}, "'b' is none of the tools"),
    ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls: must be true or false, not 1"),
    ({"functions": [{}]}, "functions: [{}] is not served"),
    ({"messages": call_with(name="a", arguments=5)}, "messages[1].tool_calls[0].function.arguments must be a JSON"),
    ({"messages": call_with(name="a", arguments=[])}, "arguments must be a JSON object, or one as a string, not []"),
    ({"messages": call_with(name="a", arguments="[" * 5000)}, "arguments is nested too deeply: more than 128 lists"),
    (
        {"messages": call_with(name="a", arguments=nested(129))},
        "messages[1].tool_calls[0].function.arguments is nested",
    ),
    ({"messages": call_with(name="a", arguments='{"a": [' + '"",' * 70_000 + '""]}')}, "more than 65536 strings"),
    ({"messages": call_with(name="a", arguments=PARTS) * 3}, "messages[5].tool_calls[0].function.arguments has more"),
    ({"messages": call_with(name=5)}, "messages[1].tool_calls[0].function.name must be a string, not 5"),
    ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages[0].tool_calls must be a list, not 5"),
    ({"messages": [{"role": "assistant", "tool_calls": [5]}]}, "messages[0].tool_calls[0] must be an object with a"),
    ({"messages": [{"role": "user", "tool_calls": [5]}]}, "messages[0].tool_calls is for assistants, not user"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "contradicts add_generation_prompt"),
]


def test_arguments_in_the_history_may_be_as_deep_as_a_body() -> None:
    """And a text in them may have any number of quotes and brackets: only what becomes a value of its own counts."""
    quoted = json.dumps({"a": '"[{' * 100_000})
    for arguments, times in ((nested(128), 3), (quoted, 3), (json.dumps({"a": '"[{ ' * 60}), 1500)):
        taken = take_talk(Fields({"messages": call_with(name="weather", arguments=arguments) * times})).messages
        found = [each["tool_calls"][0]["function"]["arguments"] for each in taken[1::2]]
        assert found == [json.loads(arguments)] * times
        call = {"id": "a", "function": {"name": "f", "arguments": found[0]}}
        assert arguments in ours(GEMMA, messages=[USER, {**CALL, "tool_calls": [call]}])


def test_arguments_in_the_history_are_taken_as_any_server_tells_them() -> None:
    """A template gets an object; of a text that is none, that text."""
    object_, broken = {"city": "Köln"}, ('{"city": "K', "{", "[]", "oops", "5", '{"a": NaN}', "```json\n{\n```", "```")
    text = json.dumps(object_)
    told: list[tuple[Any, Any]] = [
        (each, object_) for each in (object_, text, f"```json\n{text}\n```", f"```{text}```")
    ]
    nothing: list[Any] = [None, "", " ", "{}", {}, "null"]
    told += [(json.dumps(text), object_), *((each, {}) for each in nothing)]
    told += [(each, {"arguments": each}) for each in broken]
    for arguments, wanted in told:
        for message in call_with(name="weather", arguments=arguments), call_with(name="weather", arguments=arguments):
            message[1]["tool_calls"][0]["type"] = None
            taken = take_talk(Fields({"messages": message})).messages[1]
            assert taken["tool_calls"][0]["function"]["arguments"] == wanted
    (taken,) = take_talk(Fields({"messages": call_with(name="weather")[1:]})).messages
    assert taken["tool_calls"][0]["function"]["arguments"] == {}
    (taken,) = take_talk(Fields({"messages": [{"role": "assistant", "content": None}]})).messages
    assert taken["content"] == ""


@pytest.mark.parametrize(("body", "message"), MISTAKEN)
def test_what_is_mistaken(body: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        take_talk(Fields({"messages": [USER], **body}))
    assert message in str(caught.value)


def test_what_is_taken_for_no_tools() -> None:
    bodies: list[dict[str, Any]] = [{}, {"tools": []}, {"tool_choice": "auto"}, {"tools": TOOLS, "tool_choice": "none"}]
    for body in bodies:
        assert take_talk(Fields({"messages": [USER], **body})).tools == ToolUse()


def test_a_template_that_drops_the_final_message() -> None:
    with pytest.raises(InvalidParameter, match="continue_final_message: the chat template does not write"):
        ours("{{ messages[0].content }}", messages=[USER, ANSWER], continue_final_message=True)


# ----------------------------------------------------------------------------------------------------------------------
# Templates by themselves, and in processes of their own.

TALK = [
    {"role": "system", "content": 'be <brief> & "kind"'},
    {"role": "user", "content": "hé\nllo"},
    {"role": "assistant", "content": "hi"},
]
TOKENS, NO_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}, dict[str, str]()

CHATML = """{% for message in messages %}
    {% if loop.index0 > 10 %}{% break %}{% endif %}
<|im_start|>{{ message['role'] }}
{{ message['content'] | trim }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


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
def forks() -> Iterator[ForkServer]:
    running = renderers()
    yield running
    running.stop()


Make = Callable[..., RemoteTemplate]


@pytest.fixture
def made(forks: ForkServer) -> Iterator[Make]:
    """Templates, each of which is closed at the end."""
    with ExitStack() as owned:

        def make(source: str, tokens: Mapping[str, str] = NO_TOKENS) -> RemoteTemplate:
            template = RemoteTemplate(forks, source, tokens)
            owned.callback(template.close)
            return template

        yield make


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
async def test_a_hostile_template_is_refused_and_others_are_rendered(source: str, made: Make) -> None:
    hostile, good = made(source), made(CHATML, TOKENS)
    bad = asyncio.create_task(hostile.render(HELLO, True, {}))
    assert await good.render(TALK, True, {}) == ChatTemplate(CHATML, TOKENS).render(TALK, True, {})
    with pytest.raises((InvalidParameter, TemplateInvalid), match="the chat template "):
        await bad
    assert await good.render(HELLO, False, {}) == ChatTemplate(CHATML, TOKENS).render(HELLO, False, {})


async def test_conversations_share_processes(made: Make) -> None:
    """The common case forks none; nor is one lost by what a template refuses."""
    template = made("{{ messages[0].content.x() if ask else messages[0].content }}")
    for _ in range(3):
        assert await template.render(HELLO, True, {}) == "5"
        with pytest.raises(InvalidParameter, match="cannot render them|refuses them"):
            await template.render(HELLO, True, {"ask": True})
    (process,) = template._idle
    texts = await asyncio.gather(*(template.render(HELLO, True, {}) for _ in range(20)))
    assert texts == ["5"] * 20
    assert process in template._idle
    assert len(template._idle) <= templates.AT_ONCE


async def test_a_process_that_has_died_is_replaced(forks: ForkServer, made: Make) -> None:
    template = made("{{ messages[0].content }}")
    assert await template.render(HELLO, True, {}) == "5"
    await asyncio.to_thread(forks.stop)
    (process,) = template._idle
    await until(lambda: readable(process.fileno(), 0.0))
    assert await template.render(HELLO, True, {}) == "5"


async def test_where_to_fork_from_ends_between_two_chats(
    forks: ForkServer, made: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins anew; where it does not stay, that is no mistake of the caller's, nor of the template's."""
    template = made("{{ messages[0].content }}")
    for _ in range(2):
        assert await template.render(HELLO, True, {}) == "5"
        assert forks._control is not None
        forks._control.shutdown(socket.SHUT_RDWR)
        template.close()
        template = made("{{ messages[0].content }}")
    monkeypatch.setattr(forks, "_start", _nobodys)
    with pytest.raises(Busy, match="forked from is gone"):
        await template.render(HELLO, True, {})
    monkeypatch.setattr(forks, "connect", _nobodys)
    with pytest.raises(Busy, match="ended before it had forked one"):
        await template.render(HELLO, True, {})


def _nobodys() -> socket.socket:
    """A connection whose other end is closed."""
    ours, theirs = socket.socketpair()
    theirs.close()
    return ours


async def test_a_template_is_compiled_at_start_however_busy_the_machine(
    made: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def late(*_: object) -> str:
        await asyncio.Event().wait()
        return ""

    monkeypatch.setattr(templates, "LIMIT_S", 0.0)
    template = made("5")
    await template.compile()
    monkeypatch.setattr(templates, "_answer", late)
    with pytest.raises(Busy, match="not rendered within 0 s"):
        await template.render(HELLO, True, {})


async def test_who_leaves_has_nobody_elses_text(made: Make) -> None:
    template = made("{% for i in range(90000) %}{% endfor %}{{ messages[0].content }}")
    left = [asyncio.create_task(template.render([{"content": "left"}], True, {})) for _ in range(4)]
    await asyncio.sleep(0)
    for task in left[1:]:
        task.cancel()
    texts = await asyncio.gather(*(template.render([{"content": str(n)}], True, {}) for n in range(4)))
    assert texts == ["0", "1", "2", "3"]
    assert await left[0] == "left"
    await asyncio.gather(*left, return_exceptions=True)


async def test_too_many_wait(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MOST_WAITING", 2)
    template = made("5")
    found = await asyncio.gather(*(template.render(HELLO, True, {}) for _ in range(3)), return_exceptions=True)
    assert [found[0], found[1]] == ["5", "5"]
    assert isinstance(found[2], Busy)


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
