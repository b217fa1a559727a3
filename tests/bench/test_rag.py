"""The questions of `make bench-rag` follow their rule, and its figures are counted as they are told."""

from __future__ import annotations

import pytest

from bench.rag import (
    CHOSEN,
    SINGLE,
    WHOLE,
    Question,
    Sample,
    Setting,
    Told,
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

DOCUMENTS = [
    Document("a", "def a():\n    return one(two)\n    return three(four)"),
    Document("b", "def b():\n    pass"),
]


def test_an_answer_stands_in_one_document_behind_its_question() -> None:
    documents = functions()
    asked = list(questions(documents))
    assert len(asked) >= 20
    for question in asked:
        holding = [each for each in documents if question.answer in each.text]
        assert holding == [question.document]
        first, _, second = question.document.text.splitlines()[:3]
        assert (question.text, question.answer) == (first, second.strip())
    whole = {prompt.text for prompt in held_out_prompts()}
    assert all(any(each.text in text for text in whole) for each in documents)


def test_what_is_no_question() -> None:
    assert [each.text for each in questions(DOCUMENTS)] == ["def a():"]
    assert list(questions([*DOCUMENTS, Document("c", "x = return three(four)")])) == []
    for body in (
        '    """Say what."""\n    return three(four)',
        "    # a comment\n    return three(four)",
        "    x = 1\n    return three(four)",
    ):
        assert list(questions([Document("d", f"def d():\n{body}")])) == []


def test_an_answer_is_right_but_for_the_blanks_around_it() -> None:
    question = Question("def a():", "return three(four)", DOCUMENTS[0])
    assert is_right("    return three(four)\n", question)
    assert not is_right("    return three(five)", question)
    assert not is_right("", question)


def sample(row: str, right: bool, repeat: int = 0, seconds: float = 1.0, drafts: tuple[bool, ...] = ()) -> Sample:
    return Sample(repeat, 0, row, seconds, right, Told("x", drafts))


def test_figures() -> None:
    samples = [
        sample(CHOSEN, True, drafts=(True, False, False, False)),
        sample(CHOSEN, False, drafts=()),
        sample(CHOSEN, False, repeat=1, seconds=3.0, drafts=(True, True)),
        sample(SINGLE, False),
        sample(WHOLE, True, seconds=2.0),
    ]
    chosen, single, whole = row_figures(samples)
    assert (chosen.right, chosen.questions, chosen.seconds.value) == (1, 2, 2.0)
    assert (single.right, single.questions) == (0, 1)
    assert (whole.right, whole.seconds.value) == (1, 2.0)
    setting = Setting("target", "draft", TfidfRetriever(DOCUMENTS), RagOptions(top=1, clusters=1))
    asked = [Question("def a():", "return three(four)", DOCUMENTS[0]), Question("def", "pass", Document("c", ""))]
    found = chances(samples, setting, asked)
    assert (found.retrieved, found.offered, found.any_right, found.mean_right) == (1, 1, 1, 0.25)
    printed = report(samples, found)
    assert "the draft that the target chose" in printed
    assert "1 of 2" in printed
    assert "Selected, not lossless" in printed


@pytest.mark.parametrize("name", ["questions", "top", "clusters", "subsets", "tokens", "repeats"])
def test_nothing_to_measure(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"--{name}", "0"]) == 2
    assert capsys.readouterr().err == f"bench: error: {name}: must be at least 1, not 0\n"
