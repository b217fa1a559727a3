"""The commands of `specwire`, and their options from flag, environment, YAML file and default, in this order."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import yaml


class Module(Protocol):
    """What a command's module offers, or an object in one."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


@dataclass(frozen=True, slots=True)
class Command:
    """A command.

    module: its `Module`, or "module:name" of one. configurable: its options may also come from a file and the
    environment.
    """

    name: str
    help: str
    module: str
    configurable: bool = False

    def load(self) -> Module:
        """Import what it takes."""
        module, _, name = self.module.partition(":")
        found = importlib.import_module(module)
        return cast(Module, getattr(found, name) if name else found)


COMMANDS = (
    Command("up", "start the whole stack on this machine", "deploy.cli.services.up", configurable=True),
    Command("generate", "complete a prompt", "deploy.cli.clients.generate"),
    Command("chat", "talk with a model", "deploy.cli.clients.chat"),
    Command("demo", "watch drafting speed up real completions", "deploy.cli.clients.demo"),
    Command("draft", "serve a draft model", "draft_service.server", configurable=True),
    Command("verify", "serve a target model", "verify_service.server", configurable=True),
    Command("edge", "draft and serve clients here, verify elsewhere", "deploy.cli.services.edge", configurable=True),
    Command(
        "orchestrate", "serve clients with verifiers and drafters that run", "orchestrator.server", configurable=True
    ),
    Command("registry", "tell edges which verifiers are there", "deploy.cli.services.registry", configurable=True),
    Command("deploy", "run pools of services on a Ray cluster, as a file says", "deploy.cluster.commands:DEPLOY"),
    Command("status", "show what is deployed on a Ray cluster", "deploy.cluster.commands:STATUS"),
    Command("scale", "give a pool on a Ray cluster another number of replicas", "deploy.cluster.commands:SCALE"),
    Command("undeploy", "drain and end what is deployed on a Ray cluster", "deploy.cluster.commands:UNDEPLOY"),
    Command("simulate", "say what a setting would do, in virtual time", "deploy.cli.diagnosis.simulate"),
    Command("train-heads", "train a head that drafts beside a target", "deploy.cli.training:Heads"),
    Command("train-drafter", "train a small drafter of a target's own layers", "deploy.cli.training:Drafter"),
    Command("usage", "add up what a verifier's sessions used", "deploy.cli.diagnosis.usage"),
    Command("top", "show an orchestrator's services and sessions", "deploy.cli.diagnosis.top"),
    Command("doctor", "check this machine, a pair of models, a log, an address", "deploy.cli.diagnosis.doctor"),
    Command("completion", "print what has a shell complete these commands", "deploy.cli.completion"),
)
CONFIGURABLE = {command.name: command for command in COMMANDS if command.configurable}


# ----------------------------------------------------------------------------------------------------------------------
# Options in a YAML file: a section for each command, in it a line for each option, named as its flag is.
#
#     up:
#       listen: 127.0.0.1:50051
#       target-threads: 4
#     orchestrate:
#       verifier: [10.0.0.1:50061, 10.0.0.2:50061]
#
# Scalars are taken as they are written and read as the option's type asks, so that `off` and `1:30` need no quotes.

NULL = "tag:yaml.org,2002:null"


class SettingInvalid(ValueError):
    """One sentence that names the option and where its value stands."""


@dataclass(frozen=True, slots=True)
class ConfigEntry:
    """An option as the file gives it: one text or several. `place` is file and line, for people."""

    values: tuple[str, ...]
    several: bool
    place: str


Sections = dict[str, dict[str, ConfigEntry]]


def read_config(file: str, known: Iterable[str]) -> Sections:
    """The sections of a file, each option by its flag's name.

    Args:
        known: names of sections; another is refused.

    Raises:
        SettingInvalid: says what is wrong, and in which line.
    """
    sections: Sections = {}
    for name, node, place in _pairs(file, "a section for each command", _root(file)):
        if name not in known:
            raise SettingInvalid(f"{place}: unknown section {name!r}{meant(name, known)}")
        sections[name] = dict(_entries(file, name, node, place))
    return sections


def meant(given: str, known: Iterable[str]) -> str:
    """A hint for an unknown name: the known one that is like it, or all."""
    close = difflib.get_close_matches(given, list(known), 1)
    return f": {close[0]}?" if close else f"; there are {', '.join(sorted(known))}"


def _root(file: str) -> yaml.Node | None:
    try:
        root: yaml.Node | None = yaml.compose(Path(file).read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise SettingInvalid(f"config: {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise SettingInvalid(f"config: {file} is not UTF-8 at byte {error.start}") from None
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise SettingInvalid(f"config: {file}{line}: {error.problem or error.context}") from None
    except yaml.YAMLError as error:  # such as a control character
        raise SettingInvalid(f"config: {file}: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise SettingInvalid(f"config: {file} is nested too deeply") from None
    return root


def _entries(file: str, section: str, node: yaml.Node, place: str) -> Iterator[tuple[str, ConfigEntry]]:
    if _is_null(node):
        return
    for name, value, here in _pairs(file, f"options in the section {section}", node, place):
        if not _is_null(value):
            yield name.replace("_", "-"), _entry(name, value, here)


def _entry(name: str, node: yaml.Node, place: str) -> ConfigEntry:
    if isinstance(node, yaml.ScalarNode):
        return ConfigEntry((_text(name, node, place),), False, place)
    if isinstance(node, yaml.SequenceNode) and all(isinstance(each, yaml.ScalarNode) for each in node.value):
        return ConfigEntry(tuple(_text(name, each, place) for each in node.value), True, place)
    raise SettingInvalid(f"{place}: {name} must be one value, or a list of values")


def _text(name: str, node: yaml.ScalarNode, place: str) -> str:
    """Refuse half a character, which YAML can spell."""
    value: str = node.value
    try:
        value.encode()
    except UnicodeEncodeError:
        raise SettingInvalid(f"{place}: {name} holds half of a character: {value!a}") from None
    return value


def _pairs(file: str, wanted: str, node: yaml.Node | None, place: str = "") -> Iterator[tuple[str, yaml.Node, str]]:
    """Key, value and place of each line of a mapping; none of an empty file."""
    if node is None or _is_null(node):
        return
    if not isinstance(node, yaml.MappingNode):
        raise SettingInvalid(f"{place or file}: must hold {wanted}, as NAME: VALUE")
    seen: set[str] = set()
    for key, value in node.value:
        here = f"{file}, line {key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode):
            raise SettingInvalid(f"{here}: a name must be one word")
        name = key.value.replace("_", "-")
        if name in seen:
            raise SettingInvalid(f"{here}: {key.value} stands there twice")
        seen.add(name)
        yield key.value, value, here


def _is_null(node: yaml.Node) -> bool:
    """Whether a value is null or missing: the option then stays what it is without the line."""
    return isinstance(node, yaml.ScalarNode) and node.tag == NULL


# ----------------------------------------------------------------------------------------------------------------------
# A command's options from four places, each before the next one: a flag, the environment, a file, the default.
#
# The command's parser is the one list of options there is. An option `--target-threads` is `target-threads` in the
# command's section of the file (`read_config`) and SPECWIRE_TARGET_THREADS in the environment, where commas stand
# between several values, and a flag is true or false. An empty variable counts as none.

FILE_VARIABLE = "SPECWIRE_CONFIG"
PREFIX = "SPECWIRE_"
DEFAULT = "default"
FLAG_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
OWN = ("help", "config")


@dataclass(frozen=True, slots=True)
class Setting:
    """An option's value in force. name: of its flag. origin: where it came from, for people."""

    name: str
    value: Any
    origin: str = DEFAULT


class CommandOptions:
    """A parser's options and their values from elsewhere. Its own defaults are put aside: see `complete`."""

    def __init__(self, command: str, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--config",
            metavar="FILE",
            help=f"YAML with these options in a section {command} (default: ${FILE_VARIABLE})",
        )
        self._command = command
        self._parser = parser
        actions = [action for action in actions_of(parser) if action.dest not in OWN]
        self._actions = {name_of(action): action for action in actions}
        self._exclusive = [[name_of(each) for each in group._group_actions] for group in _exclusive_groups(parser)]
        self._defaults = {name: _default(action) for name, action in self._actions.items()}
        self._required = [name for name, action in self._actions.items() if action.required]
        for action in actions:
            _put_aside(action, parser.prog)

    def complete(self, args: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> list[Setting]:
        """Give `args`, which hold what the flags say, all other options; returns the options in force.

        Raises:
            SettingInvalid: names option, value and place. What is required and missing ends the program with 2.
        """
        file = args.config or environment.get(FILE_VARIABLE)
        sections = read_config(file, CONFIGURABLE) if file else {}
        levels = [self._flags(args), self._of_environment(environment), self._of_file(sections)]
        chosen = {name: Setting(name, value) for name, value in self._defaults.items()}
        for level in reversed(levels):
            self._check_exclusive(level)
            self._override(chosen, level)
        missing = [name for name in self._required if chosen[name].origin == DEFAULT]
        if missing:
            self._parser.error(f"the following arguments are required: {', '.join(map(self._flag, missing))}")
        for name, setting in chosen.items():
            setattr(args, self._actions[name].dest, setting.value)
        return list(chosen.values())

    def _override(self, chosen: dict[str, Setting], level: Mapping[str, Setting]) -> None:
        """Drop options of lower levels that an option of this level excludes."""
        for group in self._exclusive:
            if any(name in level for name in group):
                chosen.update({name: Setting(name, self._defaults[name]) for name in group})
        chosen.update(level)

    def _check_exclusive(self, level: Mapping[str, Setting]) -> None:
        for group in self._exclusive:
            given = [level[name] for name in group if name in level and level[name].value != self._defaults[name]]
            if len(given) > 1:
                raise SettingInvalid(f"{given[1].origin}: {given[1].name} is not allowed with {given[0].name}")

    def _flags(self, args: argparse.Namespace) -> dict[str, Setting]:
        given = {name: action for name, action in self._actions.items() if hasattr(args, action.dest)}
        return {name: Setting(name, getattr(args, each.dest), self._flag(name)) for name, each in given.items()}

    def _flag(self, name: str) -> str:
        action = self._actions[name]
        return f"--{name}" if action.option_strings else str(action.metavar or action.dest)

    def _of_environment(self, environment: Mapping[str, str]) -> dict[str, Setting]:
        found = {}
        for name, action in self._actions.items():
            variable = PREFIX + name.replace("-", "_").upper()
            if text := environment.get(variable):
                parts = tuple(text.split(",")) if _takes_several(action) else (text,)
                found[name] = self._setting(name, ConfigEntry(parts, len(parts) > 1, f"${variable}"))
        return found

    def _of_file(self, sections: Sections) -> dict[str, Setting]:
        return {name: self._checked(name, entry) for name, entry in sections.get(self._command, {}).items()}

    def _checked(self, name: str, entry: ConfigEntry) -> Setting:
        if name not in self._actions:
            raise SettingInvalid(
                f"{entry.place}: specwire {self._command} has no option {name!r}{meant(name, self._actions)}"
            )
        return self._setting(name, entry)

    def _setting(self, name: str, entry: ConfigEntry) -> Setting:
        action = self._actions[name]
        if entry.several and not _takes_several(action):
            raise SettingInvalid(f"{entry.place}: {name} must be one value, not {len(entry.values)}")
        try:
            values = [_converted(action, text) for text in entry.values]
        except ValueError as error:
            raise SettingInvalid(f"{entry.place}: {name} {error}") from None
        return Setting(name, values if _takes_several(action) else values[0], entry.place)


def add_command(command: Command, parser: argparse.ArgumentParser) -> CommandOptions | None:
    """Have `parser` take what `specwire COMMAND` takes; returns its options where they may come from elsewhere too."""
    command.load().add_arguments(parser)
    return CommandOptions(command.name, parser) if command.configurable else None


def actions_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """A parser's arguments, in order. argparse has no public way to read them."""
    return parser._actions


def name_of(action: argparse.Action) -> str:
    """An option by its flag's name, a positional by its own."""
    flags = [flag for flag in action.option_strings if flag.startswith("--")]
    return flags[0].removeprefix("--") if flags else action.dest


def _converted(action: argparse.Action, text: str) -> object:
    """A text as the option's type; ValueError says what it must be."""
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        if text.lower() not in FLAG_WORDS:
            raise ValueError(f"must be true or false, not {text!r}")
        return FLAG_WORDS[text.lower()]
    try:
        return action.type(text) if callable(action.type) else text
    except argparse.ArgumentTypeError as error:
        raise ValueError(str(error)) from None


def _takes_several(action: argparse.Action) -> bool:
    return isinstance(action, argparse._AppendAction)


def _default(action: argparse.Action) -> Any:
    return list(action.default) if isinstance(action.default, list) else action.default


def _put_aside(action: argparse.Action, program: str) -> None:
    """Keep an option out of the parsed arguments unless a flag gives it; its help still tells the default."""
    if action.help and action.help != argparse.SUPPRESS:
        action.help = told(action, program).replace("%", "%%")
    if not action.option_strings and action.nargs is None:
        action.nargs = "?"
    action.default = argparse.SUPPRESS
    action.required = False


def told(action: argparse.Action, program: str) -> str:
    """An option's help with its default in it."""
    return (action.help or "") % {**vars(action), "prog": program}


def _exclusive_groups(parser: argparse.ArgumentParser) -> Iterable[argparse._MutuallyExclusiveGroup]:
    return parser._mutually_exclusive_groups
