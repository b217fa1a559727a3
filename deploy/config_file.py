"""Options in a YAML file: a section for each command, in it a line for each option, named as its flag is.

    up:
      listen: 127.0.0.1:50051
      target-threads: 4
    orchestrate:
      verifier: [10.0.0.1:50061, 10.0.0.2:50061]

Scalars are taken as they are written and read as the option's type asks, so that `off` and `1:30` need no quotes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

NULL = "tag:yaml.org,2002:null"


class SettingInvalid(ValueError):
    """One sentence that names the option and where its value stands."""


@dataclass(frozen=True, slots=True)
class ConfigEntry:
    """An option as the file gives it: one text or several. `place` is file and line, for people."""

    values: tuple[str, ...]
    several: bool
    place: str


Sections = dict[str, dict[str, ConfigEntry]]


def read_config(file: str, known: Iterable[str]) -> Sections:
    """The sections of a file, each option by its flag's name.

    Args:
        known: names of sections; another is refused.

    Raises:
        SettingInvalid: says what is wrong, and in which line.
    """
    sections: Sections = {}
    for name, node, place in _pairs(file, "a section for each command", _root(file)):
        if name not in known:
            raise SettingInvalid(f"{place}: unknown section {name!r}{meant(name, known)}")
        sections[name] = dict(_entries(file, name, node, place))
    return sections


def meant(given: str, known: Iterable[str]) -> str:
    """How to go on behind an unknown name: with the known one that is like it, or all."""
    close = difflib.get_close_matches(given, list(known), 1)
    return f": {close[0]}?" if close else f"; there are {', '.join(sorted(known))}"


def _root(file: str) -> yaml.Node | None:
    try:
        root: yaml.Node | None = yaml.compose(Path(file).read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise SettingInvalid(f"config: {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise SettingInvalid(f"config: {file} is not UTF-8 at byte {error.start}") from None
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise SettingInvalid(f"config: {file}{line}: {error.problem or error.context}") from None
    except yaml.YAMLError as error:  # such as a control character
        raise SettingInvalid(f"config: {file}: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise SettingInvalid(f"config: {file} is nested too deeply") from None
    return root


def _entries(file: str, section: str, node: yaml.Node, place: str) -> Iterator[tuple[str, ConfigEntry]]:
    if _is_null(node):
        return
    for name, value, here in _pairs(file, f"options in the section {section}", node, place):
        if not _is_null(value):
            yield name.replace("_", "-"), _entry(name, value, here)


def _entry(name: str, node: yaml.Node, place: str) -> ConfigEntry:
    if isinstance(node, yaml.ScalarNode):
        return ConfigEntry((_text(name, node, place),), False, place)
    if isinstance(node, yaml.SequenceNode) and all(isinstance(each, yaml.ScalarNode) for each in node.value):
        return ConfigEntry(tuple(_text(name, each, place) for each in node.value), True, place)
    raise SettingInvalid(f"{place}: {name} must be one value, or a list of values")


def _text(name: str, node: yaml.ScalarNode, place: str) -> str:
    """YAML can spell half a character, which is no text."""
    value: str = node.value
    try:
        value.encode()
    except UnicodeEncodeError:
        raise SettingInvalid(f"{place}: {name} holds half of a character: {value!a}") from None
    return value


def _pairs(file: str, wanted: str, node: yaml.Node | None, place: str = "") -> Iterator[tuple[str, yaml.Node, str]]:
    """Key, value and place of each line of a mapping; none of an empty file."""
    if node is None or _is_null(node):
        return
    if not isinstance(node, yaml.MappingNode):
        raise SettingInvalid(f"{place or file}: must hold {wanted}, as NAME: VALUE")
    seen: set[str] = set()
    for key, value in node.value:
        here = f"{file}, line {key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode):
            raise SettingInvalid(f"{here}: a name must be one word")
        name = key.value.replace("_", "-")
        if name in seen:
            raise SettingInvalid(f"{here}: {key.value} stands there twice")
        seen.add(name)
        yield key.value, value, here


def _is_null(node: yaml.Node) -> bool:
    """Also of a key without a value: the option stays what it is without the line."""
    return isinstance(node, yaml.ScalarNode) and node.tag == NULL
