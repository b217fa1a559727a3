"""Writes build/docs/API.md from the sources of the wire and the docstrings of the Python client.

python -m scripts.api --write    write it
python -m scripts.api --check    write nothing; fail where it cannot be written
"""

from __future__ import annotations

import inspect
import re
import sys
import tempfile
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
    ServiceDescriptorProto,
)
from grpc_tools import protoc

import specwire.client
from scripts.pages import BUILT, ROOT, asked_to_write, build
from scripts.proto import PACKAGE, SOURCE_ROOT
from specwire.client.requests import RequestOptions

PAGE = BUILT / "API.md"
PROTOCOL = ROOT / "proto" / "PROTOCOL.md"
HEAD = """\
<!-- Written by scripts/api.py from proto/specwire/v1 and the docstrings of specwire.client; do not edit. -->
# API reference

Two ways in, beside [HTTP](../../docs/HTTP.md): gRPC, from any language ([the wire](#the-wire),
[statuses](#statuses)), and [Python](#the-python-client). [PROTOCOL.md](../../proto/PROTOCOL.md) says what the messages
mean together, their order and arithmetic. [examples/](../../examples/README.md) has clients that run, and calls by
server reflection, which need none of these files. A client needs `GenerationService` alone, an operator's program
`StatusService`; the rest is for those who write a drafter, a verifier or an orchestrator.
"""


def page() -> str:
    """The whole page."""
    wire = f"## The wire\n\nPackage `specwire.v1`.\n\n{wire_reference()}"
    statuses = f"## Statuses\n\n{statuses_of(PROTOCOL.read_text())}"
    client = f"## The Python client\n\n{client_reference()}"
    return "\n\n".join([HEAD.rstrip(), wire, statuses, client]) + "\n"


def statuses_of(protocol: str) -> str:
    """The section Statuses of PROTOCOL.md; raises ValueError where there is none."""
    _, found, rest = protocol.partition(". Statuses\n")
    if not found:
        raise ValueError("PROTOCOL.md: has no section Statuses")
    return rest.partition("\n## ")[0].strip().replace("(section ", "(PROTOCOL.md, section ")


# Numbers of fields in descriptor.proto: the steps of a path to what a comment is of.
MESSAGES, ENUMS, SERVICES = 4, 5, 6
FIELDS, ONEOFS, METHODS, VALUES = 2, 8, 2, 2
FIRST_FILES = ("generation", "status", "common", "draft", "verify")
Way = tuple[int, ...]
Comments = dict[Way, str]


def descriptors() -> list[FileDescriptorProto]:
    """The sources as protoc reads them, those that a client meets first; RuntimeError if it refuses one."""
    sources = sorted((SOURCE_ROOT / PACKAGE).glob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "set"
        flags = [f"-I{SOURCE_ROOT}", f"-I{files('grpc_tools') / '_proto'}"]
        flags += ["--include_source_info", f"--descriptor_set_out={out}"]
        if protoc.main(["protoc", *flags, *map(str, sources)]) != 0:
            raise RuntimeError("protoc failed")
        found = list(FileDescriptorSet.FromString(out.read_bytes()).file)
    return sorted(found, key=lambda each: (_rank(Path(each.name).stem), each.name))


def _rank(stem: str) -> int:
    return FIRST_FILES.index(stem) if stem in FIRST_FILES else len(FIRST_FILES)


def wire_reference() -> str:
    """All files, one after the other."""
    return "\n\n".join(_file(each) for each in descriptors())


def comments_of(file: FileDescriptorProto) -> Comments:
    """What stands before each definition, in one line."""
    found = {}
    for location in file.source_code_info.location:
        if text := location.leading_comments or location.trailing_comments:
            found[tuple(location.path)] = " ".join(text.split())
    return found


def _file(file: FileDescriptorProto) -> str:
    comments = comments_of(file)
    parts = [f"### {file.name}"]
    parts += [_service(each, comments, (SERVICES, i)) for i, each in enumerate(file.service)]
    parts += [_message(each, comments, (MESSAGES, i), "") for i, each in enumerate(file.message_type)]
    parts += [_enum(each, comments, (ENUMS, i), "") for i, each in enumerate(file.enum_type)]
    return "\n\n".join(parts)


def _service(service: ServiceDescriptorProto, comments: Comments, path: Way) -> str:
    rows = [
        [f"`{each.name}`", _called(each), comments.get((*path, METHODS, i), "")]
        for i, each in enumerate(service.method)
    ]
    return _section(f"service {service.name}", comments.get(path, ""), [["method", "takes and gives", ""], *rows])


def _called(method: MethodDescriptorProto) -> str:
    asked = f"{'stream ' * method.client_streaming}{_short(method.input_type)}"
    return f"{asked} -> {'stream ' * method.server_streaming}{_short(method.output_type)}"


def _message(message: DescriptorProto, comments: Comments, path: Way, outer: str) -> str:
    name = f"{outer}{message.name}"
    maps = {each.name: each for each in message.nested_type if each.options.map_entry}
    rows = [
        [str(each.number), f"`{each.name}`", _type(each, maps), _said(message, each, comments, path, i)]
        for i, each in enumerate(message.field)
    ]
    own = _section(f"message {name}", comments.get(path, ""), [["#", "field", "type", ""], *rows] if rows else [])
    inner = [
        _message(each, comments, (*path, 3, i), f"{name}.")
        for i, each in enumerate(message.nested_type)
        if not each.options.map_entry
    ]
    inner += [_enum(each, comments, (*path, 4, i), f"{name}.") for i, each in enumerate(message.enum_type)]
    return "\n\n".join([own, *inner])


def _said(message: DescriptorProto, field: FieldDescriptorProto, comments: Comments, path: Way, index: int) -> str:
    """A field's comment; that of its oneof goes before it."""
    own = comments.get((*path, FIELDS, index), "")
    if not field.HasField("oneof_index") or field.proto3_optional:
        return own
    name = message.oneof_decl[field.oneof_index].name
    shared = comments.get((*path, ONEOFS, field.oneof_index), "")
    first = min((each for each in message.field if _of_oneof(each, field.oneof_index)), key=lambda each: each.number)
    return f"One of `{name}`{f': {shared}' if shared and first.number == field.number else '.'} {own}"


def _of_oneof(field: FieldDescriptorProto, index: int) -> bool:
    return field.HasField("oneof_index") and field.oneof_index == index


def _type(field: FieldDescriptorProto, maps: dict[str, DescriptorProto]) -> str:
    entry = maps.get(_short(field.type_name).rpartition(".")[2])
    if entry is not None:
        return f"map of {_type(entry.field[0], {})} to {_type(entry.field[1], {})}"
    plain = _short(field.type_name) or FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {plain}"
    return f"optional {plain}" if field.proto3_optional else plain


def _enum(enum: EnumDescriptorProto, comments: Comments, path: Way, outer: str) -> str:
    rows = [
        [str(each.number), f"`{each.name}`", comments.get((*path, VALUES, i), "")] for i, each in enumerate(enum.value)
    ]
    return _section(f"enum {outer}{enum.name}", comments.get(path, ""), [["#", "value", ""], *rows])


def _section(title: str, text: str, rows: list[list[str]]) -> str:
    return "\n\n".join(filter(None, [f"#### {title}", _escaped(text), table(rows)]))


def table(rows: Iterable[list[str]]) -> str:
    """A table whose first row is its head; "" without rows."""
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    width = lines[0].count(" | ") + 1 if lines else 0
    return "\n".join([*lines[:1], *([f"|{' --- |' * width}"] if lines else []), *lines[1:]])


def _escaped(text: str) -> str:
    return text.replace("<", "&lt;")


def _short(name: str) -> str:
    """A type's name without our package."""
    return name.removeprefix(".").removeprefix("specwire.v1.")


WIDTH = 110
SECTIONS = ("Args", "Attributes", "Raises", "Returns", "Yields")
ENTRY = re.compile(r"    (\w[\w, ]*): (.*)")
FIRST_NAMES = ("Client", "AsyncClient", "Completion", "SpecwireError", "ClientTls")
OPTIONS = "What `generate`, `complete`, `complete_many` and `continue_` take as `**options` is what makes a request:"


def client_reference() -> str:
    """Everything that `from specwire.client import ...` may name, clients first."""
    module = specwire.client
    names = [*FIRST_NAMES, *(name for name in module.__all__ if name not in FIRST_NAMES)]
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


def main() -> int:
    """Run the command line."""
    build(PAGE, page(), write=asked_to_write(__doc__))
    return 0


if __name__ == "__main__":
    sys.exit(main())
