"""A conversation as prompts: the whole, or what follows the session before; for models with a template and without."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from deploy.cli.clients.chat import Conversation, Plain, Style, Templated
from deploy.stack.options import StackError
from specwire.client import Completion
from specwire.client.events import SamplingInForce, Stats
from specwire.core.invalid import InvalidParameter
from specwire.core.messages import FinishReason

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRIPPING = CHATML.replace("m.content", "m.content|trim")


def ended(reason: FinishReason, session: str = "s1") -> Completion:
    sampling = SamplingInForce(0.0, 0, 1.0, 1, "greedy")
    return Completion(session, 3, sampling, "", (), (), reason, "", Stats())


@asynccontextmanager
async def chatml(source: str = CHATML, eos_ids: tuple[int, ...] = (2,)) -> AsyncIterator[Templated]:
    style = Templated(source, {"eos_token": "<|im_end|>"}, eos_ids)
    try:
        await style.check()
        yield style
    finally:
        await style.close()


async def after(style: Style, answer: str, reason: FinishReason, behind: int = 0) -> tuple[str, str]:
    """Parent and prompt of the turn after an answer, behind which the session had `behind` more code points."""
    talk = Conversation(style, "Be brief.")
    talk.answered(await talk.turn("Hi"), "Hi", answer, ended(reason), len(answer) + behind)
    turn = await talk.turn("More")
    assert turn.whole.endswith(turn.prompt)
    return turn.parent, turn.prompt


async def test_plain_text_names_who_speaks() -> None:
    talk = Conversation(Plain(), "Be brief.")
    turn = await talk.turn("Hi")
    assert (turn.parent, turn.prompt) == ("", "Be brief.\n\nUser: Hi\nAssistant:")
    assert (await Conversation(Plain()).turn("Hi")).prompt == "User: Hi\nAssistant:"


async def test_plain_text_goes_on_behind_its_stop_string() -> None:
    assert await after(Plain(), " Hello.", FinishReason.STOP_STRING, len("\nUser:")) == ("s1", " More\nAssistant:")


async def test_an_answer_that_was_cut_off_is_gone_on_behind() -> None:
    for reason in (FinishReason.LENGTH, FinishReason.CANCELLED):
        assert await after(Plain(), " Hello", reason) == ("s1", "\nUser: More\nAssistant:")


@pytest.mark.parametrize(
    ("reason", "behind"),
    [
        (FinishReason.STOP_STRING, len("\nUser:") + 1),  # the token that completed it goes on
        (FinishReason.EOS, 0),  # its token is no part of plain text
        (FinishReason.CANCELLED, 1),  # something was held back
        (FinishReason.ERROR, 0),
    ],
)
async def test_where_the_session_holds_something_else_the_whole_is_sent(reason: FinishReason, behind: int) -> None:
    assert await after(Plain(), " Hello", reason, behind) == (
        "",
        "Be brief.\n\nUser: Hi\nAssistant: Hello\nUser: More\nAssistant:",
    )


async def test_a_template_goes_on_behind_the_token_that_ended_the_answer() -> None:
    expected = "\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"
    async with chatml() as style:
        assert await after(style, "Hello.", FinishReason.EOS) == ("s1", expected)
        assert await after(style, "Hello", FinishReason.LENGTH) == ("s1", "<|im_end|>" + expected)


async def test_of_several_tokens_that_end_an_answer_nobody_knows_which() -> None:
    async with chatml(eos_ids=(2, 3)) as style:
        parent, prompt = await after(style, "Hello.", FinishReason.EOS)
    assert parent == ""
    assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n")


async def test_a_template_that_changes_the_answer_gets_the_whole() -> None:
    async with chatml(STRIPPING) as style:
        assert (await after(style, " Hello.", FinishReason.EOS))[0] == ""
        assert (await after(style, "Hello.", FinishReason.EOS))[0] == "s1"


async def test_a_lost_session_and_a_clean_slate() -> None:
    talk = Conversation(Plain())
    talk.answered(await talk.turn("Hi"), "Hi", " Yes", ended(FinishReason.LENGTH), 4)
    talk.forget_session()
    assert (await talk.turn("More")).prompt == "User: Hi\nAssistant: Yes\nUser: More\nAssistant:"
    talk.clear("")
    assert (await talk.turn("More")).prompt == "User: More\nAssistant:"


async def test_an_end_that_nobody_heard() -> None:
    talk = Conversation(Plain())
    talk.answered(await talk.turn("Hi"), "Hi", " Ye", None, 3)
    assert (await talk.turn("More")).parent == ""


async def test_a_template_that_does_not_compile() -> None:
    with pytest.raises(StackError, match="the chat template does not compile: line 1"):
        async with chatml("{% if %}"):
            pass


async def test_a_template_that_takes_too_much_is_told() -> None:
    async with chatml("{{ 'a' * 8000000000 if messages[0].content == 'Hi' }}") as style:
        with pytest.raises(InvalidParameter, match=r"^messages: the chat template took more computing"):
            await Conversation(style).turn("Hi")
        assert (await Conversation(style).turn("More")).prompt == ""
