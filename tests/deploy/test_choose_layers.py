"""specwire choose-layers: from texts to a file that is served, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy.cli.main import main
from specwire.core.model import ModelError
from specwire.lm import load_model
from specwire.lm.heads.self_speculation import SkimmingModel
from tests.lm import models

WORDS = {word: index for index, word in enumerate(["?", "a", "<end>", *"bcdefgh"])}


@pytest.fixture
def target(tmp_path: Path) -> str:
    made = models.config("llama")
    made.num_hidden_layers = 3
    return models.save(models.build(made), tmp_path / "target", WORDS)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "texts.txt"
    file.write_text(" ".join("abcdefgh"[index * index % 8] for index in range(200)))
    return file


def command(target: str, data: Path, out: Path, *more: str) -> list[str]:
    short = ["--windows", "6", "--window", "12", "--threads", "1", "--dtype", "float32"]
    return ["choose-layers", "--target", target, "--data", str(data), "--out", str(out), *short, *more]


def test_what_it_writes_is_served(target: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "layers.json"
    assert main(command(target, data, out)) == 0
    said = capsys.readouterr().err
    assert "3 layers; a draft row takes 0." in said
    assert f"{out}: skips " in said
    whole = json.loads(out.read_text())
    assert whole["target"] == "target"
    lm = load_model(target, slots=1, heads=f"self:{out}")
    assert isinstance(lm, SkimmingModel)
    assert sorted([*lm.kept, *whole["skip"]]) == [0, 1, 2]
    with pytest.raises(ModelError, match=r"layers.json: weights_fingerprint is .*choose its layers anew"):
        load_model(target, slots=1, heads=f"self:{out}", dtype="bfloat16")


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (["--windows", "1"], 2, "windows: must be at least 2, not 1"),
        (["--window", "0"], 2, "window: must be at least 2, not 0"),
        (["--threads", "0"], 2, "threads: must be at least 1, not 0"),
        (["--data", "/nowhere/texts.txt"], 2, "data: there is no /nowhere/texts.txt"),
        (["--target", "/nowhere/model"], 1, "model '/nowhere/model'"),
        (["--window", "25"], 1, "context: "),
        (["--window", "24", "--data", "@small"], 1, "tokens are less than two windows of 24"),
        (["--out", "/nowhere/layers.json"], 2, "out: there is no folder /nowhere"),
        (["--target", "scripted:1"], 1, "target: "),
    ],
)
def test_what_does_not_fit_is_said_in_a_sentence(
    more: list[str],
    code: int,
    message: str,
    target: str,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "small.txt").write_text("a b c")
    more = [str(tmp_path / "small.txt") if each == "@small" else each for each in more]
    assert main(command(target, data, tmp_path / "layers.json", *more)) == code
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said
