"""A child answers in time or is reported, and ends when told to."""

from __future__ import annotations

import os
import sys

import pytest

from bench.harness.child import BenchChild, descendants
from bench.harness.runs import BenchError

ECHO = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"
CORES = """import json, os, sys
for _ in sys.stdin: print(json.dumps({"cores": [*os.sched_getaffinity(0)]}), flush=True)"""


def child(program: str) -> BenchChild:
    return BenchChild("a child", [sys.executable, "-c", program])


def test_it_answers_and_ends() -> None:
    before = descendants(os.getpid())
    with child(ECHO) as one:
        assert one.ask({"x": 1}, 20.0) == {"x": 1}
        assert one.ask({"x": 2}, 20.0) == {"x": 2}
        assert one.cpu_seconds() >= 0
    assert descendants(os.getpid()) == before
    with pytest.raises(BenchError, match="no requests any more"):
        one.ask({"x": 3}, 1.0)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system keeps no process to a core")
def test_it_and_those_below_it_keep_to_their_cores() -> None:
    one_core, before = frozenset([max(os.sched_getaffinity(0))]), set(descendants(os.getpid()))
    with BenchChild("a child", [sys.executable, "-c", CORES], cores=one_core) as one:
        assert one.ask({}, 20.0) == {"cores": [*one_core]}
        began = set(descendants(os.getpid())) - before
        assert {frozenset(os.sched_getaffinity(pid)) for pid in began} == {one_core}


def test_an_error_is_raised() -> None:
    with child(ECHO) as one, pytest.raises(BenchError, match="a child: no such thing"):
        one.ask({"error": "no such thing"}, 20.0)


def test_silence_ends_at_the_deadline() -> None:
    with child("import time; time.sleep(60)") as one, pytest.raises(BenchError, match="no answer in time"):
        one.answer(0.2)


def test_an_end_without_an_answer_is_named() -> None:
    with child("pass") as one, pytest.raises(BenchError, match="ended without an answer"):
        one.answer(20.0)
