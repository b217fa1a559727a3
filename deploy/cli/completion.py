"""`specwire completion SHELL`: a script that completes commands, flags and values, from the commands' own parsers."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from deploy.commands import COMMANDS, Command
from deploy.settings import CommandOptions, told

BASH = """\
# Bash completion of specwire: source this file, or put it into ~/.local/share/bash-completion/completions/specwire
_specwire() {
    local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" command="${COMP_WORDS[1]}" words=""
    COMPREPLY=()
    # specwire config show COMMAND takes what COMMAND does
    [ "$command" = config ] && [ "$COMP_CWORD" -gt 3 ] && command="${COMP_WORDS[3]}"
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "@COMMANDS@" -- "$word"))
        return
    fi
    case "$command:$before" in
@VALUES@
    esac
    case "$command" in
@FLAGS@
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    case "$word" in
        -*) ;;
        *) compopt -o default 2>/dev/null ;;
    esac
}
complete -F _specwire specwire
"""
ZSH = """\
#compdef specwire
# Zsh completion of specwire: put this file as _specwire into a folder of $fpath
_specwire() {
    local -a commands
    commands=(
@COMMANDS@
    )
    if (( CURRENT == 2 )); then
        _describe command commands
        return
    fi
    local command="$words[2]"
    shift words
    (( CURRENT-- ))
    case "$command" in
@ARGUMENTS@
    esac
}
if [ "$funcstack[1]" = _specwire ]; then _specwire "$@"; else compdef _specwire specwire; fi
"""
FISH_HEAD = "# Fish completion of specwire: put this file into ~/.config/fish/completions/specwire.fish"


@dataclass(frozen=True, slots=True)
class Flag:
    """names: with their dashes. takes_value: an argument follows; `choices` are the only ones, if there are any."""

    names: tuple[str, ...]
    takes_value: bool
    choices: tuple[str, ...]
    help: str


@dataclass(frozen=True, slots=True)
class Completed:
    """A command with its flags, and the words that may stand without one."""

    command: Command
    flags: tuple[Flag, ...]
    words: tuple[str, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=sorted(SCRIPTS), metavar="SHELL", help=f"one of {', '.join(sorted(SCRIPTS))}")


def run(args: argparse.Namespace) -> int:
    print(SCRIPTS[args.shell]([described(command) for command in COMMANDS]), end="")
    return 0


def described(command: Command) -> Completed:
    parser = argparse.ArgumentParser(prog=f"specwire {command.name}")
    command.load().add_arguments(parser)
    if command.configurable:
        CommandOptions(command.name, parser)
    actions = list(_actions(parser))
    flags = tuple(_flag(action, parser.prog) for action in actions if action.option_strings)
    words = [word for action in actions if not action.option_strings for word in action.choices or ()]
    return Completed(command, flags, tuple(words))


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """A command's own, and those of the commands in it."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            inner = (each for one in action.choices.values() for each in _actions(one))
            yield from (each for each in inner if each.dest != "help")


def _flag(action: argparse.Action, program: str) -> Flag:
    switch = action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction)
    return Flag(tuple(action.option_strings), not switch, tuple(map(str, action.choices or ())), told(action, program))


def bash(commands: Iterable[Completed]) -> str:
    names, values, flags = [], [], []
    for each in commands:
        name = each.command.name
        names.append(name)
        values += [f"        {_bash_case(name, flag)}" for flag in each.flags if flag.takes_value]
        offered = " ".join([*each.words, *(word for flag in each.flags for word in flag.names)])
        flags.append(f'        {name}) [ -n "$words" ] || words={shlex.quote(offered)} ;;')
    filled = {"@COMMANDS@": " ".join(names), "@VALUES@": "\n".join(values), "@FLAGS@": "\n".join(flags)}
    return _filled(BASH, filled)


def _bash_case(name: str, flag: Flag) -> str:
    """What may follow a flag: one of its choices, or whatever the shell completes by itself."""
    what = f"words={shlex.quote(' '.join(flag.choices))}" if flag.choices else "compopt -o default 2>/dev/null; return"
    return f"{'|'.join(f'{name}:{each}' for each in flag.names)}) {what} ;;"


def zsh(commands: Iterable[Completed]) -> str:
    names, arguments = [], []
    for each in commands:
        names.append(f"        {shlex.quote(f'{each.command.name}:{each.command.help}')}")
        specs = [_zsh_spec(flag, name) for flag in each.flags for name in flag.names]
        rest = f"*: :({' '.join(each.words)})" if each.words else "*: :_files"
        lines = " \\\n".join(f"                {shlex.quote(spec)}" for spec in [*specs, rest])
        arguments.append(f"        {each.command.name})\n            _arguments \\\n{lines}\n            ;;")
    return _filled(ZSH, {"@COMMANDS@": "\n".join(names), "@ARGUMENTS@": "\n".join(arguments)})


def _zsh_spec(flag: Flag, name: str) -> str:
    text = flag.help.replace("\\", "\\\\").replace("[", "\\[").replace("]", "\\]").replace(":", "\\:")
    value = (f": :({' '.join(flag.choices)})" if flag.choices else ": :_files") if flag.takes_value else ""
    return f"*{name}[{text}]{value}"


def fish(commands: Iterable[Completed]) -> str:
    lines = [FISH_HEAD]
    for each in commands:
        name = each.command.name
        lines.append(f"complete -c specwire -n __fish_use_subcommand -f -a {name} -d {_fish_text(each.command.help)}")
        seen = f"complete -c specwire -n '__fish_seen_subcommand_from {name}'"
        if each.words:
            lines.append(f"{seen} -f -a {_fish_text(' '.join(each.words))}")
        lines += [f"{seen}{_fish_flag(flag)}" for flag in each.flags]
    return "\n".join(lines) + "\n"


def _fish_flag(flag: Flag) -> str:
    names = "".join(f" -l {name[2:]}" if name.startswith("--") else f" -s {name[1:]}" for name in flag.names)
    value = (f" -x -a {_fish_text(' '.join(flag.choices))}" if flag.choices else " -r") if flag.takes_value else ""
    return f"{names}{value} -d {_fish_text(flag.help)}"


def _fish_text(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _filled(template: str, parts: dict[str, str]) -> str:
    for mark, text in parts.items():
        template = template.replace(mark, text)
    return template


SCRIPTS = {"bash": bash, "zsh": zsh, "fish": fish}
