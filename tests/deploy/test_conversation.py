"""A conversation as prompts: the whole, or what follows the session before; for models with a template and without."""

from __future__ import annotations

import pytest

from deploy.conversation import Conversation, Plain, Style
from deploy.options import StackError
from deploy.templated import Templated
from specwire.client import Completion
from specwire.client.events import SamplingInForce, Stats
from specwire.core.limits import FinishReason

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRIPPING = CHATML.replace("m.content", "m.content|trim")


def ended(reason: FinishReason, session: str = "s1") -> Completion:
    sampling = SamplingInForce(0.0, 0, 1.0, 1, "greedy")
    return Completion(session, 3, sampling, "", (), (), reason, "", Stats())


def chatml(source: str = CHATML, eos_ids: tuple[int, ...] = (2,)) -> Templated:
    return Templated(source, {"eos_token": "<|im_end|>"}, eos_ids)


def after(style: Style, answer: str, reason: FinishReason, behind: int = 0) -> tuple[str, str]:
    """Parent and prompt of the turn after an answer, behind which the session had `behind` more code points."""
    talk = Conversation(style, "Be brief.")
    talk.answered(talk.turn("Hi"), "Hi", answer, ended(reason), len(answer) + behind)
    turn = talk.turn("More")
    assert turn.whole.endswith(turn.prompt)
    return turn.parent, turn.prompt


def test_plain_text_names_who_speaks() -> None:
    talk = Conversation(Plain(), "Be brief.")
    turn = talk.turn("Hi")
    assert (turn.parent, turn.prompt) == ("", "Be brief.\n\nUser: Hi\nAssistant:")
    assert Conversation(Plain()).turn("Hi").prompt == "User: Hi\nAssistant:"


def test_plain_text_goes_on_behind_its_stop_string() -> None:
    assert after(Plain(), " Hello.", FinishReason.STOP_STRING, len("\nUser:")) == ("s1", " More\nAssistant:")


def test_an_answer_that_was_cut_off_is_gone_on_behind() -> None:
    for reason in (FinishReason.LENGTH, FinishReason.CANCELLED):
        assert after(Plain(), " Hello", reason) == ("s1", "\nUser: More\nAssistant:")


@pytest.mark.parametrize(
    ("reason", "behind"),
    [
        (FinishReason.STOP_STRING, len("\nUser:") + 1),  # the token that completed it goes on
        (FinishReason.EOS, 0),  # its token is no part of plain text
        (FinishReason.CANCELLED, 1),  # something was held back
        (FinishReason.ERROR, 0),
    ],
)
def test_where_the_session_holds_something_else_the_whole_is_sent(reason: FinishReason, behind: int) -> None:
    assert after(Plain(), " Hello", reason, behind) == (
        "",
        "Be brief.\n\nUser: Hi\nAssistant: Hello\nUser: More\nAssistant:",
    )


def test_a_template_goes_on_behind_the_token_that_ended_the_answer() -> None:
    expected = "\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"
    assert after(chatml(), "Hello.", FinishReason.EOS) == ("s1", expected)
    assert after(chatml(), "Hello", FinishReason.LENGTH) == ("s1", "<|im_end|>" + expected)


def test_of_several_tokens_that_end_an_answer_nobody_knows_which() -> None:
    parent, prompt = after(chatml(eos_ids=(2, 3)), "Hello.", FinishReason.EOS)
    assert parent == ""
    assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n")


def test_a_template_that_changes_the_answer_gets_the_whole() -> None:
    assert after(chatml(STRIPPING), " Hello.", FinishReason.EOS)[0] == ""
    assert after(chatml(STRIPPING), "Hello.", FinishReason.EOS)[0] == "s1"


def test_a_lost_session_and_a_clean_slate() -> None:
    talk = Conversation(Plain())
    talk.answered(talk.turn("Hi"), "Hi", " Yes", ended(FinishReason.LENGTH), 4)
    talk.forget_session()
    assert talk.turn("More").prompt == "User: Hi\nAssistant: Yes\nUser: More\nAssistant:"
    talk.clear("")
    assert talk.turn("More").prompt == "User: More\nAssistant:"


def test_an_end_that_nobody_heard() -> None:
    talk = Conversation(Plain())
    talk.answered(talk.turn("Hi"), "Hi", " Ye", None, 3)
    assert talk.turn("More").parent == ""


def test_a_template_that_does_not_compile() -> None:
    with pytest.raises(StackError, match="the chat template does not compile: line 1"):
        chatml("{% if %}")
