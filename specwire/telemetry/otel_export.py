"""Sends this process's spans to a collector; importable only with the extra `otel`."""

from __future__ import annotations

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

# A collector that does not answer must keep nobody from ending.
EXPORT_LIMIT_S = 3.0


def export_to(url: str, service: str) -> None:
    """In batches, from a thread of its own, over OTLP and HTTP; what is left is sent when the process ends.

    url: of the collector, such as http://127.0.0.1:4318. Its TLS is that of the exporter's own environment variables.
    """
    provider = TracerProvider(resource=Resource.create({"service.name": f"specwire-{service}"}))
    exporter = OTLPSpanExporter(f"{url.rstrip('/')}/v1/traces", timeout=EXPORT_LIMIT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
