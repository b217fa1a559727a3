"""Spans as OpenTelemetry has them; importable only where its API is installed."""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

SCOPE = "specwire"
_PROPAGATOR = TraceContextTextMapPropagator()
_FIELD = "traceparent"


class OtelSpan:
    """Implements tracing.Span."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, trace.set_span_in_context(span))
        self.traceparent = carrier.get(_FIELD, "")

    def event(self, name: str, **attributes: str | int | float | bool) -> None:
        self._span.add_event(name, attributes)

    def end(self, error: str = "", **attributes: str | int | float | bool) -> None:
        if not self._span.is_recording():
            return
        self._span.set_attributes(attributes)
        if error:
            self._span.set_status(trace.StatusCode.ERROR, error)
        self._span.end()


def begin(name: str, client: bool, parent: str, attributes: Mapping[str, str | int | float | bool]) -> OtelSpan:
    """Begin a span. An invalid traceparent counts as none: it is then below the current span, or begins a trace."""
    context = _PROPAGATOR.extract({_FIELD: parent}) if parent else None
    kind = trace.SpanKind.CLIENT if client else trace.SpanKind.SERVER
    return OtelSpan(trace.get_tracer(SCOPE).start_span(name, context, kind, attributes))
