"""Options from flags, environment, file and defaults: which one counts, and what is refused in which words."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import pytest

from deploy.cli import main as cli
from deploy.settings import CONFIGURABLE, CommandOptions, Setting, SettingInvalid
from specwire.options import CLUSTER, TABLE, WORDS, Option, options_of

ROWS = (
    Option("model", "", positional="", help=""),
    Option("listen", "", default="127.0.0.1:0", help="where (default: %(default)s, 100 %%)"),
    Option("slots", "", kind=int, default=16, help=""),
    Option("grace", "", kind=float, default=1.5, help=""),
    Option("dtype", "", choices=("float32", "bfloat16"), default="float32", help=""),
    Option("ngram", "", kind=bool, default=True, help=""),
    Option("start-timeout", "", kind=float, help=""),
)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="specwire up")
    for row in ROWS:
        row.add_to(parser, {})
    draft = parser.add_mutually_exclusive_group()
    Option("draft", "", several=True, help="").add_to(draft, {})
    Option("no-draft", "", kind=bool, help="").add_to(draft, {})
    return parser


def complete(
    *words: str, env: Mapping[str, str] | None = None, file: Path | None = None
) -> tuple[argparse.Namespace, dict[str, Setting]]:
    command = parser()
    options = CommandOptions("up", command)
    args = command.parse_args([*words, *(("--config", str(file)) if file else ())])
    settings = options.complete(args, env or {})
    return args, {setting.name: setting for setting in settings}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "c.yaml"


def test_a_flag_goes_before_the_environment_the_file_and_the_default(config: Path) -> None:
    config.write_text("up:\n  model: file\n  listen: file:1\n  slots: 3\n")
    env = {"SPECWIRE_LISTEN": "env:1", "SPECWIRE_SLOTS": "4"}
    args, settings = complete("--slots", "5", env=env, file=config)
    assert (args.model, args.listen, args.slots, args.grace) == ("file", "env:1", 5, 1.5)
    origins = {name: settings[name].origin for name in ("model", "listen", "slots", "grace")}
    assert origins == {
        "model": f"{config}, line 2",
        "listen": "$SPECWIRE_LISTEN",
        "slots": "--slots",
        "grace": "default",
    }


def test_without_file_and_environment_all_is_as_argparse_has_it() -> None:
    words = ["m", "--draft", "a", "--draft", "b", "--no-ngram"]
    args, _ = complete(*words)
    expected = {**vars(parser().parse_args(words)), "config": None}
    assert {**vars(args), "config": None} == expected


def test_the_file_may_be_named_in_the_environment(config: Path) -> None:
    config.write_text("up: {model: m}")
    assert complete(env={"SPECWIRE_CONFIG": str(config)})[0].model == "m"


def test_several_values_replace_those_of_lower_places(config: Path) -> None:
    config.write_text("up:\n  model: m\n  draft: [a, b]\n")
    assert complete(file=config)[0].draft == ["a", "b"]
    assert complete(file=config, env={"SPECWIRE_DRAFT": "c,d"})[0].draft == ["c", "d"]
    assert complete("--draft", "e", file=config, env={"SPECWIRE_DRAFT": "c,d"})[0].draft == ["e"]


def test_what_excludes_an_option_replaces_it_where_it_counts_for_more(config: Path) -> None:
    config.write_text("up:\n  model: m\n  draft: a\n")
    args, settings = complete("--no-draft", file=config)
    assert (args.draft, args.no_draft, settings["draft"].origin) == (None, True, "default")
    config.write_text("up:\n  model: m\n  draft: a\n  no-draft: true\n")
    with pytest.raises(SettingInvalid, match="line 4: no-draft is not allowed with draft"):
        complete(file=config)


def test_values_are_read_as_the_option_asks(config: Path) -> None:
    config.write_text("up:\n  model: off\n  listen: 1:30\n  grace: 2\n  ngram: off\n  slots: null\n  dtype:\n")
    args, _ = complete(file=config)
    assert (args.model, args.listen, args.grace, args.ngram) == ("off", "1:30", 2.0, False)
    assert (args.slots, args.dtype) == (16, "float32")


def test_an_empty_variable_counts_as_none() -> None:
    assert complete("m", env={"SPECWIRE_SLOTS": ""})[0].slots == 16


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("up:\n  slotz: 3", "line 2: specwire up has no option 'slotz': slots?"),
        ("upp:\n  slots: 3", "line 1: unknown section 'upp': up?"),
        ("upp:", "line 1: unknown section 'upp': up?"),
        ("up:\n  slots: many", "line 2: slots must be a whole number, not 'many'"),
        ("up:\n  ngram: perhaps", "line 2: ngram must be true or false, not 'perhaps'"),
        ("up:\n  slots: [1, 2]", "line 2: slots must be one value, not 2"),
        ("up:\n  slots: {a: 1}", "line 2: slots must be one value, or a list of values"),
        ("up:\n  slots: 1\n  slots: 2", "line 3: slots stands there twice"),
        ("up:\n  no-draft: true\n  no_draft: true", "line 3: no_draft stands there twice"),
        ("up: 3", "line 1: must hold options in the section up, as NAME: VALUE"),
        ("[up]", "must hold a section for each command, as NAME: VALUE"),
        ("up:\n  slots: [", "line 2: "),
        ("up: !!python/object/apply:os.system [x]", "line 1: must hold options in the section up"),
        ("[" * 3000, "is nested too deeply"),
        ('up:\n  target: "\\ud800x"', r"line 2: target holds half of a character: '\ud800x'"),
    ],
)
def test_a_wrong_file_is_refused_by_line(content: str, message: str, config: Path) -> None:
    config.write_text(content)
    with pytest.raises(SettingInvalid) as refused:
        complete("m", file=config)
    assert message in str(refused.value)
    assert str(config) in str(refused.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingInvalid, match="config: .*/none cannot be read: No such file"):
        complete("m", file=tmp_path / "none")
    (tmp_path / "bytes").write_bytes(b"up:\n  model: \xff")
    with pytest.raises(SettingInvalid, match="is not UTF-8 at byte 13"):
        complete("m", file=tmp_path / "bytes")


def test_what_is_required_may_come_from_anywhere_and_is_missed(capsys: pytest.CaptureFixture[str]) -> None:
    assert complete(env={"SPECWIRE_MODEL": "m"})[0].model == "m"
    with pytest.raises(SystemExit) as ended:
        complete()
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("specwire up: error: the following arguments are required: model\n")


def test_an_option_is_one_row_of_the_table_and_every_row_is_taken() -> None:
    rows = [row for rows in TABLE.values() for row in rows]
    assert len({row.name for row in rows}) == len(rows)
    assert {each for row in rows for each in row.of.split()} == {
        *WORDS,
        *CLUSTER.split(),
        "client",
        "doctor",
    }
    assert all(row.unlike.keys() <= {*row.of.split()} for row in rows)


CHECKED = [
    (command, option.name)
    for command in CONFIGURABLE
    for _, option in options_of(command)
    if option.kind in (int, float) or option.choices
]


@pytest.mark.parametrize(("command", "name"), CHECKED)
def test_a_wrong_value_is_refused_in_the_same_words_wherever_it_stands(
    command: str, name: str, config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            cli.parse([command, *words])
        assert ended.value.code == 2
        place, _, said = capsys.readouterr().err.partition(" must be ")
        assert name in place
        return said

    said = refused(f"--{name}", "x")
    assert said.endswith("not 'x'\n")
    config.write_text(f"{command}: {{{name}: x}}")
    assert refused("--config", str(config)) == said
    monkeypatch.setenv(f"SPECWIRE_{name.replace('-', '_').upper()}", "x")
    assert refused() == said
