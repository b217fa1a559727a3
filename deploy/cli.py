"""The `specwire` command. Nothing heavy is imported before it is known which command runs."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

INTERRUPTED = 128 + 2


class Module(Protocol):
    """What the module of a command offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


@dataclass(frozen=True, slots=True)
class Command:
    """A command and the module that carries it out."""

    name: str
    help: str
    module: str


COMMANDS = (
    Command("up", "start the whole stack on this machine", "deploy.up"),
    Command("generate", "complete a prompt", "deploy.generate"),
    Command("demo", "watch drafting speed up real completions", "deploy.demo"),
    Command("draft", "serve a draft model", "draft_service.server"),
    Command("verify", "serve a target model", "verify_service.server"),
    Command("edge", "draft and serve clients here, verify elsewhere", "deploy.edge"),
    Command("orchestrate", "serve clients with verifiers and drafters that run", "orchestrator.cli"),
    Command("simulate", "say what a setting would do, in virtual time", "deploy.simulate"),
)


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
    for command in COMMANDS:
        chosen = commands.add_parser(command.name, help=command.help, description=command.help.capitalize() + ".")
        if command.name == wanted:
            module = cast(Module, importlib.import_module(command.module))
            module.add_arguments(chosen)
            chosen.set_defaults(run=module.run)
    return parser.parse_args(words)
