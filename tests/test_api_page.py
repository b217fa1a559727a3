"""`make docs`, the API: all of the wire and all of the client stand on the page, each with what its source says."""

from __future__ import annotations

import re

import pytest

import specwire.client
from scripts import api
from specwire.v1 import common_pb2, draft_pb2, generation_pb2, status_pb2, verify_pb2

PAGE = api.page()


@pytest.mark.parametrize("module", [common_pb2, draft_pb2, generation_pb2, status_pb2, verify_pb2])
def test_the_whole_wire(module: object) -> None:
    file = module.DESCRIPTOR  # type: ignore[attr-defined]
    for message in file.message_types_by_name.values():
        _, found, rest = PAGE.partition(f"#### message {message.name}\n")
        assert found, message.name
        section = rest.partition("\n#### ")[0]
        for field in message.fields:
            row = re.search(rf"^\| {field.number} \| `{field.name}` \| [^|]+ \| [^|]", section, re.MULTILINE)
            assert row, f"{message.name}.{field.name} with its number, its type and what is said of it"
    for service in file.services_by_name.values():
        assert f"#### service {service.name}\n" in PAGE
        assert all(f"| `{method.name}` | " in PAGE for method in service.methods)
    for enum in file.enum_types_by_name.values():
        assert all(f"| {value.number} | `{value.name}` | " in PAGE for value in enum.values)


def test_the_whole_client() -> None:
    for name in specwire.client.__all__:
        assert f"\n### {name}\n" in PAGE
    for client in (specwire.client.Client, specwire.client.AsyncClient):
        public = [name for name in vars(client) if not name.startswith("_")]
        assert all(f"\n#### {client.__name__}.{name}\n" in PAGE for name in public)
    assert "    async complete(" in PAGE


def test_statuses_are_those_of_the_protocol() -> None:
    assert "| `DATA_LOSS` | " in PAGE
    with pytest.raises(ValueError, match="no section Statuses"):
        api.statuses_of("## 1. Parties\n")


def test_types_read_as_in_the_source() -> None:
    assert "| map of uint32 to double |" in PAGE
    assert "| repeated uint32 |" in PAGE
    assert "| optional fixed64 |" in PAGE
    assert "One of `prompt`" in PAGE


def test_a_docstring_becomes_lists() -> None:
    given = "One.\n\nArgs:\n    a: first\n        and more.\n    b, c: second.\n\nRaises:\n    E: late.\n\nTwo."
    wanted = "One.\n\n*Args*\n\n- `a`: first and more.\n- `b`, `c`: second.\n\n*Raises*\n\n- `E`: late.\n\nTwo."
    assert api.prose(given) == wanted


def test_a_bar_in_a_cell_does_not_end_it() -> None:
    assert api.table([["a"], ["b|c"]]) == "| a |\n| --- |\n| b\\|c |"
