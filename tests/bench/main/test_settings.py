"""Bad settings are one line and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

import demo_pair
from bench.main import run
from bench.main.settings import parser, settings_of
from specwire.lm import native_dtype


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompts", "0"], "prompts: must be from 1 to 64, not 0"),
        (["--tokens", "-1"], "tokens: must be at least 1, not -1"),
        (["--repeats", "0"], "repeats: must be at least 1, not 0"),
        (["--head", "/no/such/head"], "head: there is no config.json in /no/such/head"),
        (["--target", "/no/such/model"], "target: there is no directory /no/such/model"),
    ],
)
def test_bad_settings_are_named(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = ["--target", str(tmp_path), "--draft", str(tmp_path)]
    assert run.main([*models, *words]) == 2
    assert capsys.readouterr().err == f"bench: error: {message}\n"


def test_a_head_is_the_demo_pairs_unless_told(tmp_path: Path) -> None:
    asked = settings_of(parser().parse_args([]))
    assert asked.head == demo_pair.HEAD
    assert asked.shown()["head"] == "demo_pair/head"
    assert settings_of(parser().parse_args(["--head", ""])).head is None
    assert settings_of(parser().parse_args(["--target", str(tmp_path)])).head is None
    (tmp_path / "config.json").touch()
    assert settings_of(parser().parse_args(["--target", "some/model", "--head", str(tmp_path)])).head == tmp_path


def test_where_results_go() -> None:
    for words, name in (([], "main.json"), (["--box"], "box.json"), (["--box", "--out", "found.json"], "found.json")):
        args = parser().parse_args([*words, "--dtype", "float32"])
        assert settings_of(args).box == ("--box" in words)
        assert args.out.name == name


def test_quick_is_small_and_gives_way_to_what_is_said(tmp_path: Path) -> None:
    words = ["--target", str(tmp_path), "--draft", "some/model", "--quick", "--tokens", "16"]
    settings = settings_of(parser().parse_args(words))
    assert settings.shown()["dtype"] == native_dtype()
    assert (settings.prompts, settings.tokens, settings.repeats) == (2, 16, 1)
    assert settings.shown()["target"] == tmp_path.name
    assert settings.shown()["draft"] == "some/model"
