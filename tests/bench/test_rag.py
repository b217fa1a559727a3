"""The questions of `make bench-rag` follow their rule, and its figures are counted as they are told."""

from __future__ import annotations

import pytest

from bench.rag import (
    CHOSEN,
    OWN,
    OWN_SINGLE,
    SINGLE,
    WHOLE,
    Known,
    Question,
    RagSample,
    RagSetting,
    RagTold,
    chances,
    functions,
    is_right,
    main,
    questions,
    report,
    row_figures,
)
from demo_pair import held_out_prompts
from specwire.rag import Document, RagOptions, TfidfRetriever

BODY = "def a():\n    x = 1\n"
DOCUMENTS = [Document("a", f"{BODY}    return three(four)"), Document("b", "def b():\n    pass")]
ANSWER = Question(f"{BODY}    return three(", "four)", DOCUMENTS[0])


def test_an_answer_stands_in_one_document_behind_its_question() -> None:
    documents = functions()
    asked = list(questions(documents))
    assert len(asked) >= 80
    for question in asked:
        holding = [each for each in documents if each.text.startswith(question.text)]
        assert holding == [question.document]
        behind = question.document.text.removeprefix(question.text)
        assert behind != question.document.text
        assert behind.partition("\n")[0].strip() == question.answer
        assert question.text.count("\n") >= 1
    whole = {prompt.text for prompt in held_out_prompts()}
    assert all(any(each.text in text for text in whole) for each in documents)


def test_what_is_a_question() -> None:
    assert list(questions(DOCUMENTS)) == [ANSWER]
    assert [each.answer for each in questions([Document("d", f"{BODY}    y = [\n    return three")])] == ["three"]


@pytest.mark.parametrize(
    "documents",
    [
        [DOCUMENTS[0], Document("c", DOCUMENTS[0].text)],
        [Document("d", f"{BODY}    return one(two)")],
        [Document("d", f"{BODY}    x")],
        [Document("d", "def three(four):")],
    ],
)
def test_what_is_no_question(documents: list[Document]) -> None:
    assert list(questions(documents)) == []


def test_an_answer_is_right_but_for_the_blanks_around_it() -> None:
    assert is_right(" four)\n", ANSWER)
    assert not is_right("five)", ANSWER)
    assert not is_right("", ANSWER)


def sample(
    row: str, right: bool, question: int = 0, repeat: int = 0, seconds: float = 1.0, drafts: tuple[bool, ...] = ()
) -> RagSample:
    return RagSample(repeat, question, row, seconds, right, RagTold("x", drafts))


def test_figures() -> None:
    samples = [
        sample(CHOSEN, True, drafts=(True, False, False, False)),
        sample(CHOSEN, False, 1, drafts=()),
        sample(CHOSEN, False, repeat=1, seconds=3.0, drafts=(True, True)),
        *(sample(SINGLE, False, number) for number in (0, 1)),
        *(sample(OWN, number == 1, number, drafts=(True,)) for number in (0, 1)),
        *(sample(OWN_SINGLE, True, number) for number in (0, 1)),
        sample(WHOLE, True, seconds=2.0),
    ]
    chosen, single, own, own_single, whole = row_figures(samples)
    assert (chosen.right, chosen.questions, chosen.seconds.value) == (1, 2, 2.0)
    assert (single.right, own.right, own_single.right, single.questions) == (0, 1, 2, 2)
    assert (whole.right, whole.seconds.value) == (1, 2.0)
    setting = RagSetting(TfidfRetriever(DOCUMENTS), RagOptions(top=1, clusters=1))
    asked = [ANSWER, Question("def", "pass", Document("c", ""))]
    found = chances(samples, setting, asked)
    assert (found.retrieved, found.offered) == (1, 1)
    assert (found.any_right, found.mean_right) == ({CHOSEN: 1, OWN: 2}, {CHOSEN: 0.25, OWN: 2})
    assert (found.gained, found.lost) == ({CHOSEN: 1, OWN: 0}, {CHOSEN: 0, OWN: 1})
    printed = report(samples, found, Known(2, 1))
    assert "the drafter's draft that the target chose" in printed
    assert "1 of 2" in printed
    assert "Alone the target is right for 2 from that document, for 1 without any." in printed
    assert "Selected, not lossless" in printed


@pytest.mark.parametrize("name", ["questions", "top", "clusters", "subsets", "tokens", "repeats"])
def test_nothing_to_measure(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"--{name}", "0"]) == 2
    assert capsys.readouterr().err == f"bench: error: {name}: must be at least 1, not 0\n"
