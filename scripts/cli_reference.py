"""Writes build/docs/OPTIONS.md from what `specwire --help` and its commands' --help say.

python -m scripts.cli_reference --write    write it
python -m scripts.cli_reference --check    write nothing; fail where it cannot be written
"""

from __future__ import annotations

import argparse
import re
import sys

from deploy.settings import COMMANDS, Command, actions_of, add_command, told
from scripts.pages import BUILT, asked_to_write, build

PAGE = BUILT / "OPTIONS.md"
HEAD = """\
<!-- Written by scripts/cli_reference.py from the parsers of the commands; do not edit. -->
# Every command and option

As `specwire --help` and `specwire COMMAND --help` have them. How options are given, by file and environment too, and
what exit codes mean is in [CLI.md](../../docs/CLI.md).
"""
# What depends on the machine that the help is asked on.
HERE = re.compile(r", \d+ here\b")
COMMAND_LINE = "| command | does |\n| --- | --- |"
OPTION_LINE = "| option | |\n| --- | --- |"


def commands_table() -> str:
    """Render the list of `specwire --help`."""
    return "\n".join([COMMAND_LINE, *(f"| `{command.name}` | {command.help} |" for command in COMMANDS)])


def options_tables() -> str:
    """Render a table for each command, of its arguments and options as its --help has them."""
    return "\n\n".join(f"### specwire {command.name}\n\n{_table(command)}" for command in COMMANDS)


def parser_of(command: Command) -> argparse.ArgumentParser:
    """As `deploy.cli.main` makes it."""
    parser = argparse.ArgumentParser(prog=f"specwire {command.name}")
    add_command(command, parser)
    return parser


def _table(command: Command) -> str:
    parser = parser_of(command)
    shown = [each for each in actions_of(parser) if each.help is not argparse.SUPPRESS and each.dest != "help"]
    return "\n".join([OPTION_LINE, *(f"| {_names(each)} | {_said(each, parser.prog)} |" for each in shown)])


def _names(action: argparse.Action) -> str:
    """An option with its value's name; an argument by its own."""
    value = str(
        action.metavar or (f"{{{','.join(map(str, action.choices))}}}" if action.choices else action.dest.upper())
    )
    if not action.option_strings:
        return f"`{value}`"
    switch = action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction)
    return ", ".join(f"`{name}{'' if switch else f' {value}'}`" for name in action.option_strings)


def _said(action: argparse.Action, program: str) -> str:
    return HERE.sub("", told(action, program)).replace("|", "\\|")


def page() -> str:
    """The whole page."""
    return (
        "\n\n".join([HEAD.rstrip(), f"## Commands\n\n{commands_table()}", f"## Options\n\n{options_tables()}"]) + "\n"
    )


def main() -> int:
    """Run the command line."""
    build(PAGE, page(), write=asked_to_write(__doc__))
    return 0


if __name__ == "__main__":
    sys.exit(main())
