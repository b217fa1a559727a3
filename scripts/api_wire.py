"""The wire's reference: services, messages, enums, each with the comments of its source."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

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

from scripts.proto import PACKAGE, SOURCE_ROOT

# Numbers of fields in descriptor.proto: the steps of a path to what a comment is of.
MESSAGES, ENUMS, SERVICES = 4, 5, 6
FIELDS, ONEOFS, METHODS, VALUES = 2, 8, 2, 2
FIRST = ("generation", "status", "common", "draft", "verify")
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
    return FIRST.index(stem) if stem in FIRST else len(FIRST)


def reference() -> str:
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
