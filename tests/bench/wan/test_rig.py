"""Who may use which cores."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from bench.harness.runs import BenchError
from bench.wan.rig import Cores, WanPair, can_be_apart, cores_of

PAIR = WanPair("target", "draft", "float32", 1)


def with_cores(monkeypatch: pytest.MonkeyPatch, *mine: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(mine), raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None, raising=False)


def test_all_share_all_cores_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cores(monkeypatch, 0, 1)
    assert cores_of(PAIR) == Cores(frozenset(), frozenset())


def test_drafters_that_are_apart_have_the_last_core_and_nobody_else_has(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cores(monkeypatch, 7, 2, 5)
    assert can_be_apart()
    assert cores_of(replace(PAIR, apart=True)) == Cores(frozenset({7}), frozenset({2, 5}))


def test_one_core_is_not_enough_to_be_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cores(monkeypatch, 3)
    assert not can_be_apart()
    with pytest.raises(BenchError, match="a core of its own needs two"):
        cores_of(replace(PAIR, apart=True))


def test_a_system_that_keeps_no_process_to_a_core_has_nobody_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    assert not can_be_apart()
