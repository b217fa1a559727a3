"""specwire train-heads: from texts to a head that is served, an ended training that goes on, and what is refused."""

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
from specwire.lm.training import distillation
from specwire.lm.training.own_answers import SEED
from specwire.provenance import commit, cpu_model
from tests.lm import models

WORDS = {word: index for index, word in enumerate(["?", "a", "<end>", *"bcdefgh"])}
SHORT = ["--rows", "2", "--window", "12", "--depth", "2", "--threads", "1", "--draft-vocabulary", "40"]


@pytest.fixture
def target(tmp_path: Path) -> str:
    return models.save(models.build(models.config("llama")), tmp_path / "target", WORDS)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "texts.txt"
    file.write_text(" ".join("abcdefgh"[index * index % 8] for index in range(400)))
    return file


def command(target: str, data: Path, out: Path, *more: str) -> list[str]:
    return ["train-heads", "--target", target, "--data", str(data), "--out", str(out), *SHORT, *more]


@pytest.mark.parametrize(("kind", "most"), [("eagle3", 3), ("medusa", 2), ("hydra", 2), ("mtp", 3)])
def test_what_it_writes_is_served(
    kind: str, most: int, target: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Medusa and Hydra have as many heads as guesses were learnt."""
    out = tmp_path / "head"
    assert main(command(target, data, out, "--steps", "6", "--kind", kind)) == 0
    assert "held-out acceptance by position " in capsys.readouterr().err
    record = json.loads((out / "training.json").read_text())
    assert len(record["held_out_acceptance"][-1]["by_position"]) == 2
    assert record["arguments"]["kind"] == kind
    lm = load_model(target, slots=1, heads=str(out))
    assert isinstance(lm, HeadedModel)
    lm.forward([Feed(0, 0, [3, 4, 5], 1)])
    (drafted,) = lm.draft([HeadRequest(0, [3, 4, 5, 6], Sampling(), 3)])
    assert len(drafted) == most
    assert all(0 <= token < models.VOCABULARY for token in drafted)


def test_one_that_was_ended_goes_on_and_comes_to_the_same(
    target: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distillation, "EVALUATE_EVERY", 2)
    monkeypatch.setattr(distillation, "SAVE_EVERY", 2)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main(command(target, data, whole, "--steps", "6")) == 0
    step, done = distillation.Optimiser.step, 0

    def interrupted(self: distillation.Optimiser, index: int) -> None:
        nonlocal done
        done += 1
        if done == 5:
            raise KeyboardInterrupt
        step(self, index)

    monkeypatch.setattr(distillation.Optimiser, "step", interrupted)
    assert main(command(target, data, parts, "--steps", "6")) == 130
    assert main(command(target, data, parts, "--steps", "6")) == 0
    assert done == 7, "steps that were kept are not taken again"
    assert (parts / "training.json").read_text() == (whole / "training.json").read_text()


def test_a_record_tells_by_what_it_was_trained_and_going_on_keeps_it(
    target: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of the training on something else is told apart, from its first step on."""
    monkeypatch.setattr(distillation, "SAVE_EVERY", 2)
    out = tmp_path / "head"
    assert main(command(target, data, out, "--steps", "4")) == 0
    before = json.loads((out / "training.json").read_text())
    asked = {"kind": "eagle3", "steps": 4, "rows": 2, "window": 12, "depth": 2, "rate": 3e-3, "data": [str(data)]}
    assert before["seed"] == SEED
    assert asked.items() <= before["arguments"].items()
    (run,) = before["runs"]
    assert (run["from_step"], run["cpu"], run["threads"]) == (0, cpu_model(), 1)
    assert run["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert run["commit"] == commit()
    # What is done already is no part of it.
    monkeypatch.setattr("specwire.lm.training.record.cpu_model", lambda: "another")
    assert main(command(target, data, out, "--steps", "4")) == 0
    assert json.loads((out / "training.json").read_text()) == before
    assert main(command(target, data, out, "--steps", "8")) == 1, "its rate falls already"
    assert json.loads((out / "training.json").read_text()) == before


def test_a_part_on_another_machine_is_told_apart(
    target: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distillation, "SAVE_EVERY", 2)
    step, out = distillation.Optimiser.step, tmp_path / "head"

    def interrupted(self: distillation.Optimiser, index: int) -> None:
        if index == 3:
            raise KeyboardInterrupt
        step(self, index)

    with monkeypatch.context() as patched:
        patched.setattr(distillation.Optimiser, "step", interrupted)
        assert main(command(target, data, out, "--steps", "6")) == 130
    monkeypatch.setattr("specwire.lm.training.record.cpu_model", lambda: "another")
    assert main(command(target, data, out, "--steps", "6")) == 0
    runs = json.loads((out / "training.json").read_text())["runs"]
    assert [(run["from_step"], run["cpu"]) for run in runs] == [(0, cpu_model()), (2, "another")]


@pytest.mark.parametrize(
    ("more", "key"),
    [
        (["--rows", "3"], "rows"),
        (["--inner", "48"], "inner"),
        (["--taps", "0", "1", "1"], "taps"),
        (["--rate", "0.01"], "rate"),
        (["--depth", "3"], "depth"),
        (["--kind", "mtp"], "kind"),
        (["--data", "other"], "data"),
        (["--target", "other"], "target"),
    ],
)
def test_one_that_was_ended_does_not_go_on_as_another(
    more: list[str],
    key: str,
    target: str,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(distillation, "SAVE_EVERY", 2)
    out = tmp_path / "head"
    assert main(command(target, data, out, "--steps", "2")) == 0
    other = {"--data": str(tmp_path / "other.txt"), "--target": str(tmp_path / "other")}
    (tmp_path / "other.txt").write_text(data.read_text()[::-1])
    models.save(models.build(models.config("llama"), seed=5), tmp_path / "other", WORDS)
    assert (
        main(command(target, data, out, "--steps", "2", more[0], *(other.get(more[0], one) for one in more[1:]))) == 1
    )
    assert f"{out / distillation.CHECKPOINT}: {key}: is of " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--steps", "0"], "steps: must be at least 1, not 0"),
        (["--window", "5"], "window: must be at least 6 for a depth of 2, not 5"),
        (["--kind", "hydra", "--inner", "8"], "inner: is of eagle3 and mtp, not of hydra"),
        (["--kind", "medusa", "--layers", "0"], "layers: must be at least 1, not 0"),
        (["--rate", "7"], "rate: must be above 0 and below 1, not 7"),
        (["--data", "/nowhere/texts.txt"], "data: there is no /nowhere/texts.txt"),
    ],
)
def test_wrong_options_are_refused(
    more: list[str], message: str, target: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(target, data, tmp_path / "head", *more)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--target", "/nowhere/model"], "target '/nowhere/model'"),
        (["--window", "300"], "tokens are less than the 3 windows of 301 of a step"),
        (["--taps", "0", "1", "9"], "taps: must be of layers 0 to 1, not 0, 1, 9"),
        (["--taps", "0", "1", "2"], "taps: must be of layers 0 to 1, not 0, 1, 2"),
    ],
)
def test_what_does_not_fit_is_said_in_a_sentence(
    more: list[str], message: str, target: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(target, data, tmp_path / "head", *more)) == 1
    assert message in capsys.readouterr().err
