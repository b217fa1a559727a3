"""`specwire completion SHELL`: a script that completes commands, flags and values, from the commands' own parsers."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

import shtab

from deploy.cli.config import add_show
from deploy.commands import COMMANDS, CONFIGURABLE, Command
from deploy.settings import actions_of, add_command

SHELLS = ("bash", "fish", "zsh")  # those of shtab's shells that were tried
# shtab's own for fish offers nothing behind --flag=
FILE = {**shtab.FILE, "fish": "(__fish_complete_path (string replace -r '^--[^=]*=' '' -- (commandline -ct)))"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=f"one of {', '.join(SHELLS)}")


def run(args: argparse.Namespace) -> int:
    parser = argparse.ArgumentParser(prog="specwire")
    _add_commands(parser, COMMANDS)
    _offer_files(parser)
    print(shtab.complete(parser, args.shell))
    return 0


def _add_commands(parser: argparse.ArgumentParser, commands: Iterable[Command]) -> None:
    inner = parser.add_subparsers()
    for command in commands:
        one = inner.add_parser(command.name, help=command.help)
        if command.name == "config":  # `config show COMMAND` takes what COMMAND does
            _add_commands(add_show(one), CONFIGURABLE.values())
        else:
            add_command(command, one)


def _offer_files(parser: argparse.ArgumentParser) -> None:
    """Complete file names where any value may stand."""
    for action in actions_of(parser):
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                _offer_files(inner)
        elif action.nargs != 0 and not action.choices:
            action.complete = FILE  # type: ignore[attr-defined]  # shtab reads it there
