"""Options of a service as its command line, checked by the command's own parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from deploy.commands import CONFIGURABLE
from deploy.settings import name_of


class InvalidOptions(ValueError):
    """One sentence that names the option and its value."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InvalidOptions(message.removeprefix("argument "))


def words_of(command: str, options: Mapping[str, Any]) -> tuple[str, ...]:
    """`options` by their flags' names, as arguments; what is true is a flag, several values are given in turn."""
    actions = {name_of(action): action for action in _parser(command)._actions}
    return tuple(word for name, value in options.items() for word in _option_words(name, value, actions.get(name)))


def check_words(words: Sequence[str]) -> None:
    """Raises InvalidOptions unless `specwire WORDS` parses."""
    try:
        _parser(words[0]).parse_args(words[1:])
    except argparse.ArgumentError as error:
        raise InvalidOptions(str(error)) from None


def _option_words(name: str, value: object, action: argparse.Action | None) -> Iterator[str]:
    if isinstance(value, bool):
        if value:
            yield f"--{name}"
        elif isinstance(action, argparse.BooleanOptionalAction):
            yield f"--no-{name}"
        elif action is None:
            raise InvalidOptions(f"--{name}: is not known")
        return
    for each in value if isinstance(value, list) else [value]:
        if not isinstance(each, (str, int, float)):
            raise InvalidOptions(f"--{name}: must be a value or a list of values, not {value!r}")
        yield f"--{name}={each}"


def _parser(command: str) -> argparse.ArgumentParser:
    parser = _Parser(prog=f"specwire {command}", allow_abbrev=False)
    CONFIGURABLE[command].load().add_arguments(parser)
    return parser
