"""`specwire completion SHELL`: a script that completes commands, flags and values, from the commands' own parsers."""

from __future__ import annotations

import argparse

import shtab

from deploy.settings import COMMANDS, actions_of, add_command

SHELLS = ("bash", "fish", "zsh")  # those of shtab's shells that were tried
# shtab's own for fish offers nothing behind --flag=
FILE = {**shtab.FILE, "fish": "(__fish_complete_path (string replace -r '^--[^=]*=' '' -- (commandline -ct)))"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=f"one of {', '.join(SHELLS)}")


def run(args: argparse.Namespace) -> int:
    parser = argparse.ArgumentParser(prog="specwire")
    inner = parser.add_subparsers()
    for command in COMMANDS:
        add_command(command, inner.add_parser(command.name, help=command.help))
    _offer_files(parser)
    print(shtab.complete(parser, args.shell))
    return 0


def _offer_files(parser: argparse.ArgumentParser) -> None:
    """Complete file names where any value may stand."""
    for action in actions_of(parser):
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                _offer_files(inner)
        elif action.nargs != 0 and not action.choices:
            action.complete = FILE  # type: ignore[attr-defined]  # shtab reads it there
