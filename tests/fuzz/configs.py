"""What an operator may write: the config file and the environment. Each gets one clear error."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hypothesis import strategies as st

import deploy.cli.main
import deploy.cli.services.edge
import deploy.cli.services.registry
import orchestrator.server
from deploy.settings import CONFIGURABLE, CommandOptions, SettingInvalid
from deploy.stack.options import stack_options
from specwire.core.invalid import InvalidParameter
from specwire.options import number, whole
from specwire.rpc.process import say as say_line
from specwire.rpc.server_options import model_options
from tests.fuzz.messages import Values
from tests.fuzz.requests import ODD, ODD_ONE, junk

Build = Callable[[argparse.Namespace], object]

# What each command makes of its options before it starts anything, and what it catches meanwhile.
BUILDERS: dict[str, tuple[Build, type[ValueError]]] = {
    "up": (stack_options, InvalidParameter),
    "draft": (model_options, InvalidParameter),
    "verify": (model_options, InvalidParameter),
    "edge": (deploy.cli.services.edge.options_of, ValueError),
    "orchestrate": (orchestrator.server.options_of, ValueError),
    "registry": (deploy.cli.services.registry.options_of, InvalidParameter),
}
SCALARS = [
    *("127.0.0.1:0", "0.0.0.0:1", "[::1]:65535", "localhost:99999", "::", "1", "0", "-1", "1e9", "nan", "inf", "0x10"),
    *("true", "no", "auto", "off", "memory:", "redis://x", "rediss://u:p@h:1/9", "unix://", "8G", "-3M", "lockstep:4"),
    *("stream:1,2,3", "float32", "int8", "openvino", "/dev/null", "/proc/self/mem", "x" * 5000, "", "é", "{}", "[1]"),
]
# What a command cannot do without.
NEEDED: dict[str, dict[str, Values]] = {
    **{command: {} for command in ("up", "draft", "verify")},
    "orchestrate": {"verifier": st.just("127.0.0.1:1")},
    "edge": {"verifier": st.just("127.0.0.1:1"), "draft": st.just("m")},
    "registry": {"registry": st.just("redis://127.0.0.1:1")},
}
DAMAGED = [
    *("up: &a [*a]", "? [a]\n: b", "up: !!python/object/apply:os.system [ls]", "\t", "---\n---\n", "up:\n\tx: 1", "{"),
    *("[" * 3000, "a: " * 3000, "up: {<<: 1}", "%YAML 9.9\n---\n", "\ufeffup:", "up:\n  listen: *x", "'", "!", "- -"),
]


@dataclass(frozen=True, slots=True)
class Written:
    """A command's config file and environment."""

    command: str
    file: bytes
    environment: dict[str, str]


def options_of(command: str) -> tuple[argparse.ArgumentParser, CommandOptions]:
    parser = argparse.ArgumentParser(prog=command)
    CONFIGURABLE[command].load().add_arguments(parser)
    return parser, CommandOptions(command, parser)


ACTIONS = {command: options_of(command)[1]._actions for command in CONFIGURABLE}
NAMES = {command: sorted(actions) for command, actions in ACTIONS.items()}
scalars: Values = st.one_of(st.sampled_from(SCALARS), st.text(max_size=8).filter(lambda text: "\0" not in text))


def _fitting(action: argparse.Action | None) -> Values:
    """What an option may be, by its type."""
    if action is None:
        return scalars
    if action.choices is not None:
        return st.sampled_from(sorted(action.choices))
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        return st.booleans()
    if action.type in (whole, number):
        return st.sampled_from([0, 1, 2, 16, 0.5, -1, 1 << 40, "nan"])
    return scalars


@st.composite
def written(draw: st.DrawFn) -> Written:
    command = draw(st.sampled_from(sorted(NAMES)))
    name = st.sampled_from([*NAMES[command] * 4, "lisen", "config", "0"])
    value: Values = st.one_of(scalars, scalars, scalars, st.lists(scalars, max_size=3), junk)
    names = {*draw(st.lists(name, max_size=4)), *NEEDED[command]}
    fits = {each: NEEDED[command].get(each, _fitting(ACTIONS[command].get(each))) for each in names}
    lines = [f"  {each}: {json.dumps(draw(value if draw(ODD) == ODD_ONE else fits[each]))}" for each in sorted(names)]
    file = "\n".join([f"{command}:", *lines]).encode()
    if draw(ODD) == ODD_ONE:
        file = draw(st.one_of(st.sampled_from(DAMAGED).map(str.encode), st.binary(max_size=30)))
    given = draw(st.dictionaries(st.sampled_from(NAMES[command]), scalars, max_size=1))
    return Written(command, file, {f"SPECWIRE_{name.replace('-', '_').upper()}": text for name, text in given.items()})


def read(case: Written) -> Counter[str]:
    """Make options of it as the command does; how that ended. Whatever no command catches gets out."""
    parser, options = options_of(case.command)
    build, caught = BUILDERS[case.command]
    words = ["m"] if case.command in ("draft", "verify") else []
    with tempfile.NamedTemporaryFile() as file, contextlib.redirect_stderr(io.StringIO()):
        Path(file.name).write_bytes(case.file)
        try:
            args = parser.parse_args([*words, "--config", file.name])
            options.complete(args, case.environment)
            build(args)
        except SettingInvalid as error:
            return _said(error)
        except caught as error:
            return _said(error)
        except SystemExit as end:
            return Counter({f"EXIT_{end.code}": 1})
    return Counter({"OK": 1})


def _said(error: ValueError) -> Counter[str]:
    assert str(error), "an error that says nothing"
    assert not isinstance(error, UnicodeError), f"an error that names no field: {error}"
    return Counter({type(error).__name__.upper(): 1})


# Escape sequences, and characters that command a terminal or reorder what it shows.
ESCAPES = [
    "\x1b]0;X\x07",
    "\x1b[2J",
    "\x9b31m",
    "\x90",
    "\r",
    "\b" * 5,
    "\x7f",
    "\n",
    "\u202e",
    "\u2066",
    "\udc9b",
    "\x00",
]
COMMANDING = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u202a-\\u202e\\u2066-\\u2069]")
controls: Values = st.lists(st.one_of(st.sampled_from(ESCAPES), st.text(max_size=3)), max_size=4).map("".join)


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """What somebody may type, or paste: options with anything in their values, and options that there are none of."""
    command = draw(st.sampled_from([*sorted(NAMES), "generate", "chat", "no-such"]))
    names = st.sampled_from([*NAMES.get(command, ["choice"]), "no-such"])
    given = draw(st.lists(st.tuples(names, st.one_of(controls, scalars)), max_size=3))
    words = [f"--{name}={value}" for name, value in given]
    return [command, *words, *draw(st.sampled_from([["--no-such"], [], ["m"]])), draw(controls)]


def type_line(words: list[str]) -> Counter[str]:
    """What a terminal gets for it, if it is refused before anything is started, commands nothing."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        end = _typed(words)
    found = COMMANDING.search(said.getvalue())
    assert found is None, f"{words}: {said.getvalue()!r}"
    return Counter({end: 1})


def _typed(words: list[str]) -> str:
    try:
        args = deploy.cli.main.parse(words)
        build, caught = BUILDERS.get(words[0], (lambda _: None, ValueError))
    except SystemExit as end:
        return f"EXIT_{end.code}"
    try:
        build(args)
    except caught as error:
        say_line(f"specwire {words[0]}: error: {error}")
        return type(error).__name__.upper()
    return "OK"
