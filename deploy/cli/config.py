"""`specwire config show`: the options in force of the commands that serve, and where each came from."""

from __future__ import annotations

import argparse
import json

from deploy.cli.main import CommandParser
from deploy.cli.terminal import dim, wants_colour
from deploy.commands import CONFIGURABLE
from deploy.settings import DEFAULT, CommandOptions, Setting, SettingInvalid
from specwire.redis.urls import without_password
from specwire.rpc.process import say

URLS = ("redis-url", "registry", "traces")
NONE = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    show = add_show(parser)
    show.add_argument("of", choices=[*CONFIGURABLE], metavar="COMMAND", help=f"one of {', '.join(CONFIGURABLE)}")
    show.add_argument("flags", nargs=argparse.REMAINDER, metavar="...", help="the command's own arguments")


def add_show(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The parser of `config show`, without the command that it is asked of."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = actions.add_parser(
        "show",
        help="print the options in force",
        description="Print the options in force: defaults, config file, environment, flags.",
    )
    show.add_argument("--json", action="store_true", help="print one JSON object")
    return show


def run(args: argparse.Namespace) -> int:
    try:
        settings = settings_of(args.of, args.flags)
    except SettingInvalid as error:
        say(f"specwire config: error: {error}")
        return 2
    print(as_json(args.of, settings) if args.json else as_table(settings))
    return 0


def settings_of(command: str, words: list[str]) -> list[Setting]:
    """The options in force if `specwire COMMAND WORDS` were run. Raises SettingInvalid; wrong words end with 2."""
    parser = CommandParser(prog=f"specwire {command}")
    CONFIGURABLE[command].load().add_arguments(parser)
    options = CommandOptions(command, parser)
    given, unknown = parser.parse_known_args(words)
    if unknown:
        parser.refuse(unknown)
    return [_public(setting) for setting in options.complete(given)]


def _public(setting: Setting) -> Setting:
    """The setting without its password. Tokens are in files only, which are not read for this."""
    if setting.name in URLS and setting.value is not None:
        return Setting(setting.name, without_password(setting.value), setting.origin)
    return setting


def as_json(command: str, settings: list[Setting]) -> str:
    options = {each.name: {"value": each.value, "origin": each.origin} for each in settings}
    return json.dumps({"command": command, "options": options})


def as_table(settings: list[Setting]) -> str:
    """A line for each option; defaults are dimmed."""
    names, values = [each.name for each in settings], [shown(each.value) for each in settings]
    widths = max(map(len, names)), max(map(len, values))
    colour = wants_colour()
    return "\n".join(
        dim(line, colour and each.origin == DEFAULT)
        for each, value in zip(settings, values, strict=True)
        for line in [f"{each.name.ljust(widths[0])}  {value.ljust(widths[1])}  {each.origin}"]
    )


def shown(value: object) -> str:
    """A value as it would be written in the file; - for none."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(str, value))}]" if value else NONE
    return NONE if value in (None, "") else str(value)
