"""What users are told in a line, out of a group of tasks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bench.runs import BenchError
from specwire.client import SpecwireError


@contextmanager
def first_failure() -> Iterator[None]:
    """Of a task group that failed, BenchError with what is for users; a group without that is raised as it is."""
    try:
        yield
    except ExceptionGroup as group:
        told: BaseException | None = group.subgroup((BenchError, SpecwireError))
        while isinstance(told, BaseExceptionGroup):
            told = told.exceptions[0]
        if told is None:
            raise
        raise BenchError(str(told)) from group
