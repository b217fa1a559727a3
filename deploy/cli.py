"""The `specwire` command. Nothing heavy is imported before it is known which command runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from deploy.commands import COMMANDS
from deploy.config_file import SettingInvalid
from deploy.settings import Options

INTERRUPTED = 128 + 2


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out a command; returns the exit code."""
    # gRPC, when it is imported, takes from here what it may write to stderr: not a line for every handshake that fails.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        return _main(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:  # before the command listens to signals itself
        return INTERRUPTED


def _main(words: list[str]) -> int:
    args = parse(words)
    return int(args.run(args))


def parse(words: list[str]) -> argparse.Namespace:
    """Read a command line; only the module of the wanted command is imported. Exits with 2 where it is wrong."""
    wanted = next((word for word in words if not word.startswith("-")), None)
    parser = argparse.ArgumentParser(prog="specwire", description="Speculative decoding over the wire.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    options: Options | None = None
    for command in COMMANDS:
        chosen = commands.add_parser(command.name, help=command.help, description=command.help.capitalize() + ".")
        if command.name == wanted:
            module = command.load()
            module.add_arguments(chosen)
            chosen.set_defaults(run=module.run)
            options = Options(command.name, chosen) if command.configurable else None
    args = parser.parse_args(words)
    try:
        if options is not None:
            options.complete(args)
    except SettingInvalid as error:
        parser.exit(2, f"specwire {args.command}: error: {error}\n")
    return args
