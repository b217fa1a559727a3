"""The copy bench: its prompts, and its figures by source."""

from __future__ import annotations

import pytest

from bench.copy import BOTH, NGRAM, PLAIN, CopyRun, acceptances, copy_prompt, different, main, own_proposal_us
from bench.harness.runs import Sample
from demo_pair import held_out_prompts


def sample(row: str, tokens: tuple[int, ...] = (1, 2), prompt: int = 0, **counts: int) -> Sample:
    return Sample(0, prompt, row, CopyRun(tokens, 1.0, 0.1, 2, None, None, (), "", None, **counts))


def test_a_prompt_holds_whole_lines_and_begins_them_again() -> None:
    prompt = copy_prompt("a\nb\nc\nd\ne\nf\ng\nhalf a li")
    assert prompt == "a\nb\nc\nd\ne\nf\ng\n\n\na\nb\nc\nd\ne\n"
    assert all(len(copy_prompt(each.text)) > 500 for each in held_out_prompts())


def test_acceptance_by_source() -> None:
    samples = [
        sample(BOTH, tested_all=10, accepted_all=7, tested_ngram=6, accepted_ngram=6),
        sample(BOTH, tested_all=2, accepted_all=1),
        sample(NGRAM, tested_all=4, accepted_all=3, tested_ngram=4, accepted_ngram=3),
    ]
    assert acceptances(samples, BOTH) == {"drafter": 2 / 6, "ngram": 1.0}
    assert acceptances(samples, NGRAM) == {"drafter": None, "ngram": 0.75}


def test_texts_that_differ_are_counted_by_prompt() -> None:
    samples = [sample(PLAIN), sample(PLAIN, (3, 3), prompt=1), sample(NGRAM), sample(NGRAM, (3, 4), prompt=1)]
    assert (different(samples, NGRAM), different(samples, PLAIN)) == (1, 0)


def test_a_proposal_takes_time() -> None:
    assert own_proposal_us(tokens=200, proposals=20) > 0


@pytest.mark.parametrize("name", ["prompts", "tokens", "repeats"])
def test_nothing_to_measure(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"--{name}", "0"]) == 2
    assert capsys.readouterr().err == f"bench: error: {name}: must be at least 1, not 0\n"
