"""The Python client's reference: what specwire.client offers, with signatures and docstrings."""

from __future__ import annotations

import inspect
import re
from typing import Any

import specwire.client
from specwire.client.requests import RequestOptions

WIDTH = 110
SECTIONS = ("Args", "Attributes", "Raises", "Returns", "Yields")
ENTRY = re.compile(r"    (\w[\w, ]*): (.*)")
FIRST = ("Client", "AsyncClient", "Completion", "SpecwireError", "ClientTls")
OPTIONS = "What `generate`, `complete`, `complete_many` and `continue_` take as `**options` is what makes a request:"


def reference() -> str:
    """Everything that `from specwire.client import ...` may name, clients first."""
    module = specwire.client
    names = [*FIRST, *(name for name in module.__all__ if name not in FIRST)]
    types = "\n".join(f"    {name}: {kind.__forward_arg__}" for name, kind in RequestOptions.__annotations__.items())
    options = f"### Options of a generation\n\n{OPTIONS}\n\n{types}\n\n{prose(inspect.getdoc(RequestOptions) or '')}"
    parts = [described(name, getattr(module, name)) for name in names]
    return "\n\n".join([prose(inspect.getdoc(module) or ""), parts[0], options, *parts[1:]])


def described(name: str, value: Any) -> str:
    """A class, or an alias of several."""
    if not inspect.isclass(value):
        return f"### {name}\n\n`{name} = {' | '.join(each.__name__ for each in value.__args__)}`"
    head = f"### {name}\n\n    {name}{_signature(value)}"
    methods = [_member(name, each, getattr(value, each)) for each in vars(value) if not each.startswith("_")]
    documented = inspect.getdoc(value) or ""
    if documented.startswith(f"{name}("):  # a dataclass without a docstring of its own
        documented = ""
    return "\n\n".join(filter(None, [head, prose(documented), *methods]))


def _member(owner: str, name: str, value: Any) -> str:
    """A method with its signature, a property with its type; "" for a field."""
    if isinstance(value, property) and value.fget is not None:
        kind = inspect.signature(value.fget).return_annotation
        return f"#### {owner}.{name}\n\n    {name}: {kind}\n\n{prose(inspect.getdoc(value) or '')}".rstrip()
    if not inspect.isfunction(value):
        return ""
    mark = "async " if inspect.iscoroutinefunction(value) else ""
    return (
        f"#### {owner}.{name}\n\n    {mark}{name}{_signature(value)}\n\n{prose(inspect.getdoc(value) or '')}".rstrip()
    )


def _signature(value: Any) -> str:
    """As it would be written, indented as a block, without self; a parameter a line where it is long."""
    signature = inspect.signature(value)
    kept = [_bare(each) for each in signature.parameters.values() if each.name != "self"]
    given = signature.return_annotation
    result = "" if given in (inspect.Signature.empty, "None", None) else f" -> {given}"
    if any(each.kind is inspect.Parameter.KEYWORD_ONLY for each in kept):
        first = next(i for i, each in enumerate(kept) if each.kind is inspect.Parameter.KEYWORD_ONLY)
        words = [*map(str, kept[:first]), "*", *map(str, kept[first:])]
    else:
        words = list(map(str, kept))
    line = f"({', '.join(words)}){result}"
    return line if len(line) <= WIDTH else "\n".join(["(", *(f"        {word}," for word in words), f"    ){result}"])


def _bare(parameter: inspect.Parameter) -> inspect.Parameter:
    """With its annotation as it stands in the source, not in quotes."""
    return parameter.replace(annotation=Bare(str(parameter.annotation)))


class Bare(str):
    """Text that shows itself without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def prose(docstring: str) -> str:
    """A docstring as a page has it: Args and the like become lists; backticks stay."""
    lines: list[str] = []
    in_section = False
    for line in docstring.splitlines():
        if line.rstrip(":") in SECTIONS and line.endswith(":"):
            in_section = True
            lines += [f"*{line.rstrip(':')}*", ""]
        elif in_section and (entry := ENTRY.fullmatch(line)):
            names = ", ".join(f"`{name}`" for name in entry.group(1).split(", "))
            lines.append(f"- {names}: {entry.group(2)}")
        elif in_section and line.startswith(" "):
            lines[-1] += f" {line.strip()}" if lines[-1] else line.strip()
        else:
            in_section = in_section and not line
            lines.append(line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
