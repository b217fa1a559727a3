"""Each test that `make test` leaves out is there, and `make test-all` runs it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.thorough import KEPT, ROOT, listed, long_ones, measured


def defined(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }


def test_each_line_names_a_test_that_is_there() -> None:
    there: dict[str, set[str]] = {}
    for name in listed():
        file, _, function = name.partition("::")
        path = ROOT / file
        if file not in there:
            there[file] = defined(path) if path.exists() else set()
        assert function in there[file], f"tests/thorough.txt: {name} is not there: python -m tests.thorough"


def test_what_stands_for_many_is_not_left_out() -> None:
    assert listed()
    assert all((ROOT / each).exists() for each in KEPT)
    assert not [name for name in listed() if name.startswith(KEPT)]


def test_times_of_parameters_add_up_and_those_of_a_class_are_the_class_s(tmp_path: Path) -> None:
    report = tmp_path / "unit.xml"
    case = '<testcase classname="{}" name="{}" time="{}"/>'
    cases = [
        case.format("tests.test_thorough", "test_a[1]", 2.0),
        case.format("tests.test_thorough", "test_a[2]", 1.5),
        case.format("tests.test_thorough.TestB", "test_b", 4.0),
        case.format("tests.test_thorough", "test_c", 0.5),
        case.format("tests.faults.test_matrix", "test_cell[1]", 9.0),
    ]
    report.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    seconds = measured([report])
    assert seconds["tests/test_thorough.py::test_a"] == pytest.approx(3.5)
    assert list(long_ones(seconds)) == ["tests/test_thorough.py::TestB", "tests/test_thorough.py::test_a"]
