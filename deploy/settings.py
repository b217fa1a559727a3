"""A command's options from four places, each before the next one: a flag, the environment, a file, the default.

The command's parser is the one list of options there is. An option `--target-threads` is `target-threads` in the
command's section of the file (`deploy.config_file`) and SPECWIRE_TARGET_THREADS in the environment, where commas stand
between several values, and a flag is true or false. An empty variable counts as none.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from deploy.commands import CONFIGURABLE
from deploy.config_file import ConfigEntry, Sections, SettingInvalid, meant, read_config

FILE_VARIABLE = "SPECWIRE_CONFIG"
PREFIX = "SPECWIRE_"
DEFAULT = "default"
FLAG_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
TYPE_NAMES: dict[object, str] = {int: "a whole number", float: "a number"}
OWN = ("help", "config")


@dataclass(frozen=True, slots=True)
class Setting:
    """An option's value in force. name: of its flag. origin: where it came from, for people."""

    name: str
    value: Any
    origin: str = DEFAULT


class CommandOptions:
    """What a parser takes, with which values from elsewhere. Its own defaults are put aside: see `complete`."""

    def __init__(self, command: str, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--config",
            metavar="FILE",
            help=f"YAML with these options in a section {command} (default: ${FILE_VARIABLE})",
        )
        self._command = command
        self._parser = parser
        actions = [action for action in parser._actions if action.dest not in OWN]
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
        """What excludes what a level gives, and came from a lower one, is as if it had not been given."""
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
    convert = action.type if callable(action.type) else str
    try:
        value = convert(text)
    except argparse.ArgumentTypeError as error:
        raise ValueError(str(error)) from None
    except ValueError:
        raise ValueError(f"must be {TYPE_NAMES.get(convert, 'another value')}, not {text!r}") from None
    if action.choices is not None and value not in action.choices:
        raise ValueError(f"must be one of {', '.join(map(str, action.choices))}, not {text!r}")
    return value


def _takes_several(action: argparse.Action) -> bool:
    return isinstance(action, argparse._AppendAction)


def _default(action: argparse.Action) -> Any:
    if isinstance(action.default, str) and callable(action.type):
        return action.type(action.default)
    return list(action.default) if isinstance(action.default, list) else action.default


def _put_aside(action: argparse.Action, program: str) -> None:
    """Nothing of it is to be in the parsed arguments unless a flag says so, but its help tells the default."""
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
