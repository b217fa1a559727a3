"""specwire train-heads: from answers to a head that is served, an ended training that goes on, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from deploy.cli.main import main
from specwire.core.draft import HeadRequest
from specwire.core.law.sampling import Sampling
from specwire.core.model import Feed
from specwire.lm import load_model
from specwire.lm.heads.slots import HeadedModel
from specwire.lm.training import loop
from specwire.lm.training.own_answers import SEED
from specwire.provenance import commit, cpu_model
from tests.lm import models
from tests.lm.training.answering import keep_answers, save_target

TEXTS, TOKENS = 60, 1000
SHORT = ["--rows", "2", "--window", "32", "--depth", "2", "--threads", "1", "--draft-vocabulary", "40"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def answers(target: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("answers")
    keep_answers(target, folder, TEXTS)
    return folder


def command(target: str, answers: Path, out: Path, *more: str) -> list[str]:
    own = ["--target", target, "--answers", str(answers), "--tokens", str(TOKENS), "--out", str(out)]
    return ["train-heads", *own, *SHORT, *more]


def test_what_it_writes_is_served(
    target: str, answers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "head"
    assert main(command(target, answers, out, "--steps", "6")) == 0
    assert "held-out acceptance by position " in capsys.readouterr().err
    record = json.loads((out / "training.json").read_text())
    assert len(record["held_out_acceptance"][-1]["by_position"]) == 2
    lm = load_model(target, slots=1, heads=str(out))
    assert isinstance(lm, HeadedModel)
    lm.forward([Feed(0, 0, [3, 4, 5], 1)])
    (drafted,) = lm.draft([HeadRequest(0, [3, 4, 5, 6], Sampling(), 3)])
    assert len(drafted) == 3
    assert all(0 <= token < models.VOCABULARY for token in drafted)


def test_a_record_tells_by_what_it_was_trained_and_going_on_keeps_it(
    target: str, answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of the training on something else is told apart, from its first step on."""
    monkeypatch.setattr(loop, "SAVE_EVERY", 2)
    out = tmp_path / "head"
    assert main(command(target, answers, out, "--steps", "4")) == 0
    before = json.loads((out / "training.json").read_text())
    asked = {"steps": 4, "rows": 2, "window": 32, "depth": 2, "rate": 3e-3, "answer-tokens": TOKENS + 8}
    assert before["seed"] == SEED
    assert asked.items() <= before["arguments"].items()
    (run,) = before["runs"]
    assert (run["from_step"], run["cpu"], run["threads"]) == (0, cpu_model(), 1)
    assert run["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert run["commit"] == commit()
    # What is done already is no part of it.
    monkeypatch.setattr("specwire.lm.training.loop.cpu_model", lambda: "another")
    assert main(command(target, answers, out, "--steps", "4")) == 0
    assert json.loads((out / "training.json").read_text()) == before
    assert main(command(target, answers, out, "--steps", "8")) == 1, "its rate falls already"
    assert json.loads((out / "training.json").read_text()) == before


def test_a_part_on_another_machine_is_told_apart(
    target: str, answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "SAVE_EVERY", 2)
    step, out = loop.Optimiser.step, tmp_path / "head"

    def interrupted(self: loop.Optimiser, index: int) -> None:
        if index == 3:
            raise KeyboardInterrupt
        step(self, index)

    with monkeypatch.context() as patched:
        patched.setattr(loop.Optimiser, "step", interrupted)
        assert main(command(target, answers, out, "--steps", "6")) == 130
    monkeypatch.setattr("specwire.lm.training.loop.cpu_model", lambda: "another")
    assert main(command(target, answers, out, "--steps", "6")) == 0
    runs = json.loads((out / "training.json").read_text())["runs"]
    assert [(run["from_step"], run["cpu"]) for run in runs] == [(0, cpu_model()), (2, "another")]


def test_one_that_was_ended_does_not_go_on_as_another(
    target: str, answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loop, "SAVE_EVERY", 2)
    out, other = tmp_path / "head", {"rows": "3", "inner": "48", "rate": "0.01", "depth": "3", "draft-vocabulary": "30"}
    assert main(command(target, answers, out, "--steps", "2")) == 0
    for key, value in {**other, "tokens": "900"}.items():
        assert main(command(target, answers, out, "--steps", "2", f"--{key}", value)) == 1
        named = "answers" if key == "tokens" else key
        assert f"{out / loop.CHECKPOINT}: {named}: is of " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--target", "/nowhere/model"], "model '/nowhere/model'"),
        (["--taps", "0", "1", "1"], "taps: is 0 1 2, not 0 1 1"),
    ],
)
def test_what_does_not_fit_is_said_in_a_sentence(
    more: list[str],
    message: str,
    target: str,
    answers: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(command(target, answers, tmp_path / "head", *more)) == 1
    assert message in capsys.readouterr().err
