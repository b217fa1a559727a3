"""What `make bench-learn` makes of its answers: parts of each kind, ratios behind the change, the learner's cost."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from bench.harness.runs import BenchError, Run
from bench.learn import LEARNING, PARTS, STATIC, Answer, bars, cost, main, parts, report, requests
from demo_pair import TARGET


def answers(count: int = 2 * PARTS) -> list[Answer]:
    """The learner's drafts are accepted twice as often behind the change, and answers come in half of the time."""
    found = []
    for place in range(2 * count):
        kind = place // count
        for row, accepted, seconds in ((STATIC, 4, 1.0), (LEARNING, 8 if kind else 4, 0.5)):
            run = Run((1,) * 10, seconds, 0.1, 5, tested=10, accepted=accepted)
            found.append(Answer(place, kind, row, run, kind, cpu_s=place * 0.5, wall_s=float(place)))
    return found


def test_each_kind_is_told_in_parts_of_equal_length() -> None:
    told = parts(answers())
    assert [each.kind for each in told] == [0] * PARTS + [1] * PARTS
    assert {each.requests for each in told} == {2}
    assert [each.first for each in told] == list(range(0, 4 * PARTS, 2))
    assert told[0].acceptance == {STATIC: 0.4, LEARNING: 0.4}
    assert told[-1].acceptance == {STATIC: 0.4, LEARNING: 0.8}
    assert told[-1].tokens_per_second == {STATIC: 10.0, LEARNING: 20.0}
    assert told[-1].version == 1


def test_bars_are_of_what_comes_behind_the_change() -> None:
    acceptance, speed = bars(answers())
    assert (acceptance.value, acceptance.holds) == (2.0, True)
    assert (speed.value, speed.holds) == (2.0, True)
    told = report(answers())
    assert "acceptance behind the change, learning / static" in told
    assert "MISSED" not in told


def test_what_the_learner_cost() -> None:
    spent = cost(answers())
    assert spent.tokens == 2 * 2 * PARTS * 10
    assert spent.cpu_s == (4 * PARTS - 1) * 0.5


def test_requests_are_of_both_folders_and_the_same_every_time(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    for name, suffix in (("one", ".py"), ("other", ".h")):
        (tmp_path / name / "site-packages").mkdir(parents=True)
        for number in range(3):
            text = "".join(f"{name}_{number}_{line} = {line}\n" for line in range(300))
            (tmp_path / name / f"{number}{suffix}").write_text(text)
        (tmp_path / name / "site-packages" / "not.py").write_text("not = 1\n" * 300)
    folders = (tmp_path / "one", tmp_path / "other")
    asked = requests(folders, 5, tokenizer)
    assert asked == requests(folders, 5, tokenizer)
    assert [each.kind for each in asked] == [0] * 5 + [1] * 5
    assert len({each.prompt for each in asked}) == 10
    assert "not" not in tokenizer.decode(list(asked[0].prompt))
    (tmp_path / "empty").mkdir()
    with pytest.raises(BenchError, match="empty: has code for 0 prompts, not 5"):
        requests((tmp_path / "empty",), 5, tokenizer)


@pytest.mark.parametrize("name", ["requests", "tokens"])
def test_nothing_to_measure(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"--{name}", "0"]) == 2
    assert capsys.readouterr().err == f"bench: error: {name}: must be at least 1, not 0\n"
