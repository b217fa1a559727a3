"""Sends this process's spans to a collector; importable only with the extra `otel`."""

from __future__ import annotations

from urllib.request import getproxies

import requests
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

# A collector that does not answer must keep nobody from ending.
EXPORT_LIMIT_S = 3.0


def export_to(url: str, service: str, ca: str = "", certificate: str = "", key: str = "") -> None:
    """In batches, from a thread of its own, over OTLP and HTTP; what is left is sent when the process ends.

    Args:
        url: of the collector, such as http://127.0.0.1:4318.
        ca: a file with the authorities that an https collector is trusted by; "" for the usual ones.
        certificate, key: files of what it is shown; "" for nothing.
    """
    provider = TracerProvider(resource=Resource.create({"service.name": f"specwire-{service}"}))
    exporter = OTLPSpanExporter(
        f"{url.rstrip('/')}/v1/traces",
        certificate_file=ca or None,
        client_certificate_file=certificate or None,
        client_key_file=key or None,
        timeout=EXPORT_LIMIT_S,
        session=_trusting_only_what_is_named() if ca else None,
    )
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)


def _trusting_only_what_is_named() -> requests.Session:
    """REQUESTS_CA_BUNDLE would be trusted in place of it. Proxies are those of the environment all the same."""
    session = requests.Session()
    session.trust_env = False
    session.proxies.update(getproxies())
    return session
