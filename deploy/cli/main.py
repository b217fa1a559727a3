"""The `specwire` command. Nothing heavy is imported before it is known which command runs."""

from __future__ import annotations

import argparse
import asyncio
import difflib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from deploy.settings import COMMANDS, CommandOptions, SettingInvalid, actions_of, add_command
from deploy.stack.processes import AT_END
from specwire import __version__
from specwire.rpc.process import SIGNALS, one_line, say, uncollected, visible

# ----------------------------------------------------------------------------------------------------------------------
# The frame of a command that owns processes: signals, errors in one line, and nothing left behind.
#
# The first SIGINT or SIGTERM cancels the work, which cleans up; the second ends everything on the spot, however late.

Work = Callable[[Path], Awaitable[int]]


def run_owned(name: str, work: Work) -> int:
    """Run `work` with a private folder (short path, removed afterwards); returns the exit code.

    It takes the process's signals, so only a main program may call this.
    """
    folder = Path(tempfile.mkdtemp(prefix="specwire-"))
    try:
        return asyncio.run(_signalled(name, work, folder))
    finally:
        _leave_nothing(folder)


async def _signalled(name: str, work: Work, folder: Path) -> int:
    """Run `work`, cancelled by a signal; 128 + the signal's number is then the exit code unless `work` returns one.

    Signals are not the event loop's, which would give them back at its end: what is left is cleaned up behind that.
    """
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work(folder))
    received: list[int] = []

    def on_signal(number: int, _: object) -> None:
        if received:
            _leave_nothing(folder)
            os._exit(128 + number)
        received.append(number)
        if not loop.is_closed():
            loop.call_soon_threadsafe(task.cancel)

    for number in SIGNALS:
        signal.signal(number, on_signal)
    try:
        return await task
    except asyncio.CancelledError:
        return 128 + (received[0] if received else signal.SIGINT)
    except Exception as error:  # any error that stops a command is one line for its user
        say(f"specwire {name}: error: {one_line(error)}")
        return 1


def _leave_nothing(folder: Path) -> None:
    for clean in [*AT_END]:
        clean()
    shutil.rmtree(folder, ignore_errors=True)


INTERRUPTED = 128 + 2
LINE_END = "\n"
# Modules that the extra `services` brings. Without them a client has what it needs, but only few commands run.
OF_SERVICES = frozenset({"grpc_health", "grpc_reflection", "msgspec", "prometheus_client", "redis", "tokenizers"})


class CommandParser(argparse.ArgumentParser):
    """Reports errors in one line, as all commands do."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Print an error with its control characters escaped: typed text and files may hold some."""
        super().exit(status, f"{visible(message.removesuffix(LINE_END), lines=False)}{LINE_END}" if message else None)

    def refuse(self, unknown: list[str]) -> NoReturn:
        """The error for unknown arguments, with the option that is most like the first one."""
        known = [option for action in actions_of(self) for option in action.option_strings]
        close = difflib.get_close_matches(unknown[0].partition("=")[0], known, 1)
        self.error(f"unrecognized arguments: {' '.join(unknown)}{f': {close[0]}?' if close else ''}")


class Version(argparse.Action):
    """--version."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        print(f"specwire {__version__}")
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out a command; returns the exit code."""
    # gRPC reads this when it is imported: no line on stderr for every handshake that fails.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        return _main(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:  # before the command listens to signals itself
        return INTERRUPTED
    except BrokenPipeError:
        print("specwire: error: stdout: nobody reads it any more", file=sys.stderr)
        return 1
    finally:
        _flush()


def _flush() -> None:
    """Flush now: where nobody reads, Python would print a traceback at its end."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _main(words: list[str]) -> int:
    try:
        with uncollected():  # modules of the command
            args = parse(words)
        return int(args.run(args))
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in OF_SERVICES:
            raise
        say(f"specwire: error: {error.name} is not installed: pip install 'specwire[services]'")
        return 2


def parse(words: list[str]) -> argparse.Namespace:
    """Read a command line; only the module of the wanted command is imported. Exits with 2 where it is wrong."""
    wanted = next((word for word in words if not word.startswith("-")), None)
    parser = chosen = CommandParser(prog="specwire", description="Speculative decoding over the wire.")
    parser.add_argument("--version", action=Version, nargs=0, help="print the version and end")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    options: CommandOptions | None = None
    for command in COMMANDS:
        one = commands.add_parser(command.name, help=command.help, description=command.help.capitalize() + ".")
        if command.name == wanted:
            chosen, options = one, add_command(command, one)
            chosen.set_defaults(run=command.load().run)
    args, unknown = parser.parse_known_args(words)
    if unknown:
        chosen.refuse(unknown)
    try:
        if options is not None:
            options.complete(args)
    except SettingInvalid as error:
        parser.exit(2, f"specwire {args.command}: error: {error}\n")
    return args
