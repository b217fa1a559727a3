"""Traces: one for each session, from its client through orchestrator, verifier and drafter.

Spans are OpenTelemetry's where that is installed (the extra `otel`), and nothing at all where it is not. They go where
the process's tracer provider sends them: `--traces` sets one up, a program that has its own keeps that.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from typing import Protocol

from specwire.rpc.keys import Metadata

try:
    from specwire.telemetry import otel
except ModuleNotFoundError:  # the extra is not installed
    otel = None  # type: ignore[assignment]  # a module, or nothing

# The header's name, in HTTP and in gRPC's metadata.
TRACEPARENT = "traceparent"
Value = str | int | float | bool


class Side(Enum):
    """Which end of a call a span is of."""

    CLIENT = auto()
    SERVER = auto()


class Span(Protocol):
    """Something that takes time. Methods never raise; after `end` they do nothing."""

    @property
    def traceparent(self) -> str:
        """What to hand to those who work for this span; "" where there is no trace."""
        ...

    def event(self, name: str, **attributes: Value) -> None: ...

    def end(self, error: str = "", **attributes: Value) -> None:
        """error: why it failed."""
        ...


class _Nothing:
    traceparent = ""

    def event(self, name: str, **attributes: Value) -> None:
        pass

    def end(self, error: str = "", **attributes: Value) -> None:
        pass


NO_SPAN: Span = _Nothing()


def begin(name: str, side: Side, parent: str = "", **attributes: Value) -> Span:
    """A span below `parent`, a traceparent; without one below whatever is current here."""
    if otel is None:
        return NO_SPAN
    return otel.begin(name, side is Side.CLIENT, parent, attributes)


@contextmanager
def spanned(name: str, side: Side, parent: str = "", **attributes: Value) -> Iterator[Span]:
    """`begin`; the span ends with the block, as failed where an exception leaves it."""
    span, problem = begin(name, side, parent, **attributes), ""
    try:
        yield span
    except Exception as error:
        problem = str(error) or type(error).__name__
        raise
    finally:
        span.end(problem)


def metadata_of(span: Span) -> tuple[tuple[str, str], ...]:
    """What a call is sent with on behalf of the span."""
    return ((TRACEPARENT, span.traceparent),) if span.traceparent else ()


def parent_in(metadata: Metadata | None) -> str:
    """The traceparent of a call's metadata; "" where it has none."""
    return next((str(value) for name, value in metadata or () if name == TRACEPARENT), "")


class LinkSpans:
    """The spans of the sessions of links, each known by its link and handle. Only sessions that came with a trace."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._open: dict[tuple[Hashable, int], Span] = {}

    def begin(self, link: Hashable, handle: int, traceparent: str, **attributes: Value) -> None:
        if not traceparent or otel is None:
            return
        self.end(link, handle)
        self._open[link, handle] = begin(self._name, Side.SERVER, traceparent, **attributes)

    def event(self, link: Hashable, handle: int, name: str, **attributes: Value) -> None:
        span = self._open.get((link, handle))
        if span is not None:
            span.event(name, **attributes)

    def end(self, link: Hashable, handle: int, error: str = "", **attributes: Value) -> None:
        """End the session's span; a session without one is ignored."""
        span = self._open.pop((link, handle), None)
        if span is not None:
            span.end(error, **attributes)

    def lose(self, link: Hashable) -> None:
        """The link is gone, and its sessions with it."""
        for each, handle in [key for key in self._open if key[0] == link]:
            self.end(each, handle, "the link was lost")
