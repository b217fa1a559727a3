"""A child answers in time or is reported, and ends when told to."""

from __future__ import annotations

import os
import sys

import pytest

from bench.child import Child
from bench.runs import BenchError
from deploy.stack.processes import descendants

ECHO = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"


def child(program: str) -> Child:
    return Child("a child", [sys.executable, "-c", program])


def test_it_answers_and_ends() -> None:
    before = descendants(os.getpid())
    with child(ECHO) as one:
        assert one.ask({"x": 1}, 20.0) == {"x": 1}
        assert one.ask({"x": 2}, 20.0) == {"x": 2}
        assert one.cpu_seconds() >= 0
    assert descendants(os.getpid()) == before
    with pytest.raises(BenchError, match="no requests any more"):
        one.ask({"x": 3}, 1.0)


def test_an_error_is_raised() -> None:
    with child(ECHO) as one, pytest.raises(BenchError, match="a child: no such thing"):
        one.ask({"error": "no such thing"}, 20.0)


def test_silence_ends_at_the_deadline() -> None:
    with child("import time; time.sleep(60)") as one, pytest.raises(BenchError, match="no answer in time"):
        one.answer(0.2)


def test_an_end_without_an_answer_is_named() -> None:
    with child("pass") as one, pytest.raises(BenchError, match="ended without an answer"):
        one.answer(20.0)
