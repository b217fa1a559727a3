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
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ModuleNotFoundError:  # the extra is not installed
    trace = None  # type: ignore[assignment]  # a module, or nothing

# The header's name, in HTTP and in gRPC's metadata.
TRACEPARENT = "traceparent"
SCOPE = "specwire"
# Seconds. A collector that does not answer must keep nobody from ending.
EXPORT_LIMIT_S = 3.0
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


class _OtelSpan:
    def __init__(self, span: trace.Span) -> None:
        self._span = span
        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier, trace.set_span_in_context(span))
        self.traceparent = carrier.get(TRACEPARENT, "")

    def event(self, name: str, **attributes: Value) -> None:
        self._span.add_event(name, attributes)

    def end(self, error: str = "", **attributes: Value) -> None:
        if not self._span.is_recording():
            return
        self._span.set_attributes(attributes)
        if error:
            self._span.set_status(trace.StatusCode.ERROR, error)
        self._span.end()


def begin(name: str, side: Side, parent: str = "", **attributes: Value) -> Span:
    """A span below `parent`, a traceparent; without a valid one below whatever is current here."""
    if trace is None:
        return NO_SPAN
    context = TraceContextTextMapPropagator().extract({TRACEPARENT: parent}) if parent else None
    kind = trace.SpanKind.CLIENT if side is Side.CLIENT else trace.SpanKind.SERVER
    return _OtelSpan(trace.get_tracer(SCOPE).start_span(name, context, kind, attributes))


def export_to(url: str, service: str) -> None:
    """Send this process's spans in batches, from a thread of its own, over OTLP and HTTP; the rest when it ends.

    url: of the collector, such as http://127.0.0.1:4318. Its TLS is that of the exporter's own environment variables.
    """
    # An extra, and slow to import.
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": f"specwire-{service}"}))
    exporter = OTLPSpanExporter(f"{url.rstrip('/')}/v1/traces", timeout=EXPORT_LIMIT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)


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
        if not traceparent or trace is None:
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
