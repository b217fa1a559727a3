"""One trace for a session, from its client through all services, gathered in memory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from orchestrator import server
from orchestrator.options import OrchestratorOptions
from specwire.client import AsyncClient, SpecwireError, Started
from specwire.rpc.channel import open_channel
from specwire.telemetry import tracing
from specwire.telemetry.tracing import NO_SPAN, LinkSpans, Side, begin, metadata_of, parent_in
from specwire.v1 import generation_pb2, generation_pb2_grpc
from tests.orchestrator.redis_for_tests import RedisServer
from tests.orchestrator.stack import PROMPT, TARGET, stack
from tests.telemetry.stack import Observed, ask, observed
from tests.wait import raised, until

ROOT = Path(__file__).resolve().parents[2]
SERVICES = {"specwire.generate", "specwire.verify", "specwire.draft"}
CLIENT = "specwire.v1.GenerationService/Generate"
ABOVE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Of every span that ends in the test."""
    kept, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return kept


async def spans_of(exporter: InMemorySpanExporter, names: set[str]) -> dict[str, ReadableSpan]:
    """By name, once all of them have ended: services hear of the end a moment after the client."""
    await until(lambda: names <= {span.name for span in exporter.get_finished_spans()})
    return {span.name: span for span in exporter.get_finished_spans()}


def trace_of(span: ReadableSpan) -> int:
    assert span.context is not None
    return int(span.context.trace_id)


def parent_of(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


async def complete(stack: Observed, exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    with trace.get_tracer("test").start_as_current_span("the caller's own"):
        completion = await stack.client.complete(PROMPT, max_tokens=12, ignore_eos=True)
    spans = await spans_of(exporter, {*SERVICES, CLIENT})
    assert len(completion.tokens) == 12
    return spans


def check_tree(spans: dict[str, ReadableSpan]) -> None:
    own, client, generate = spans["the caller's own"], spans[CLIENT], spans["specwire.generate"]
    assert len({trace_of(span) for span in spans.values()}) == 1
    for below, above in (
        (client, own),
        (generate, client),
        *((spans[n], generate) for n in SERVICES - {generate.name}),
    ):
        assert above.context is not None
        assert parent_of(below) == above.context.span_id, below.name


async def test_one_trace_from_the_client_to_verifier_and_drafter(exporter: InMemorySpanExporter) -> None:
    async with observed() as stack:
        spans = await complete(stack, exporter)
        check_tree(spans)
        told = spans["specwire.generate"]
        assert [event.name for event in told.events] == ["first token"]
        assert told.attributes is not None
        assert told.attributes["output_tokens"] == 12
        assert told.attributes["reason"] == "length"
        assert [event.name for event in spans["specwire.verify"].events] == ["seated", "decided"]
        for span in spans.values():  # an id is a right to read: no span has a whole one
            assert len(str((span.attributes or {}).get("session", ""))) in (0, 8)
        exporter.clear()

        body = json.dumps({"prompt": list(PROMPT), "max_tokens": 5, "model": "scripted:7"})
        await ask(stack.http, f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\ntraceparent: {ABOVE}", body)
        by_http = await spans_of(exporter, SERVICES)
        assert {f"{trace_of(span):032x}" for span in by_http.values()} == {ABOVE.split("-")[1]}
        assert f"{parent_of(by_http['specwire.generate']):016x}" == ABOVE.split("-")[2]
        exporter.clear()

        await raised(SpecwireError, stack.client.complete([10_000], max_tokens=5))
        refused = (await spans_of(exporter, {CLIENT}))[CLIENT]
        assert refused.status.status_code is trace.StatusCode.ERROR
        exporter.clear()


async def test_who_watches_and_who_takes_over_are_traced(exporter: InMemorySpanExporter) -> None:
    """Two orchestrators with one log: a claimed session has a span at the second, and its verifier below that."""
    with RedisServer() as redis:
        async with stack(f"{TARGET}:delay_ms=10", redis_url=redis.url) as running:
            other = await server.start(OrchestratorOptions((running.verifier.address,), (), redis.url))
            async with AsyncClient(running.orchestrator.address, patience=0.0) as first:
                events = first.generate(PROMPT, max_tokens=60, ignore_eos=True, request_id="traced")
                started = await anext(events)
                assert isinstance(started, Started)
                await anext(events)
                await spans_of(exporter, set())
                exporter.clear()
                request = generation_pb2.WatchRequest(session_id=started.session_id, take_over=True)
                async with open_channel(other.address) as channel:
                    stub = generation_pb2_grpc.GenerationServiceStub(channel)
                    told = [each async for each in stub.Watch(request, metadata=(("traceparent", ABOVE),))]
                assert told[-1].HasField("finished")
                await events.aclose()
            spans = await spans_of(exporter, {"specwire.watch", "specwire.session"})
            await other.stop(0.0)
    watch, session = spans["specwire.watch"], spans["specwire.session"]
    assert f"{trace_of(watch):032x}" == f"{trace_of(session):032x}" == ABOVE.split("-")[1]
    assert watch.context is not None
    assert session.context is not None
    assert parent_of(session) == watch.context.span_id
    assert [event.name for event in session.events][:2] == ["driven elsewhere", "claimed"]
    assert (session.attributes or {})["reason"] == "length"
    below = [each for each in exporter.get_finished_spans() if parent_of(each) == session.context.span_id]
    assert {each.name for each in below} == {"specwire.verify"}
    for span in (watch, session):
        assert len(str((span.attributes or {})["session"])) == 8


def test_what_is_no_traceparent_begins_a_trace(exporter: InMemorySpanExporter) -> None:
    for parent in (
        "",
        "x",
        "00-" + "0" * 32 + "-" + "0" * 16 + "-01",
        ABOVE + "-" + "x" * 10_000,
        "\x00",
        ABOVE.upper(),
    ):
        begin("a", Side.SERVER, parent).end()
    assert all(span.parent is None for span in exporter.get_finished_spans())
    assert len({trace_of(span) for span in exporter.get_finished_spans()}) == 6


def test_a_span_hands_on_itself(exporter: InMemorySpanExporter) -> None:
    span = begin("a", Side.CLIENT, ABOVE)
    assert re.fullmatch(r"00-0af7651916cd43dd8448eb211c80319c-[0-9a-f]{16}-01", span.traceparent)
    assert parent_in(metadata_of(span)) == span.traceparent != ABOVE
    span.end("it failed", tokens=3)
    span.end()
    (kept,) = exporter.get_finished_spans()
    assert (kept.status.description, (kept.attributes or {})["tokens"]) == ("it failed", 3)


def test_spans_of_links_end_with_them(exporter: InMemorySpanExporter) -> None:
    spans = LinkSpans("specwire.verify")
    spans.begin("a", 1, "")
    assert not spans._open  # nobody asked for a trace
    for link, handle in (("a", 1), ("a", 2), ("b", 1), ("a", 2)):
        spans.begin(link, handle, ABOVE)
    assert len(exporter.get_finished_spans()) == 1  # the handle was used again
    spans.lose("a")
    spans.end("a", 1)
    spans.event("a", 1, "too late")
    assert len(exporter.get_finished_spans()) == 3
    spans.end("b", 1)
    assert not spans._open
    assert len(exporter.get_finished_spans()) == 4


def test_without_the_extra_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "trace", None)
    span = begin("a", Side.CLIENT, ABOVE)
    assert span is NO_SPAN
    assert metadata_of(span) == ()
    spans = LinkSpans("specwire.verify")
    spans.begin("a", 1, ABOVE)
    assert not spans._open


def test_with_no_provider_nothing_is_recorded_or_sent() -> None:
    span = begin("a", Side.CLIENT)
    assert metadata_of(span) == ()
    span.event("e")
    span.end()


SENDER = """
import argparse, sys
from specwire.options import add_options
from specwire.telemetry.options import telemetry_of
from specwire.telemetry.tracing import Side, begin

parser = argparse.ArgumentParser()
add_options(parser, "orchestrate")
telemetry_of(parser.parse_args()).start("verifier")
begin("a span", Side.SERVER).end()
"""


def send(folder: Path, *words: str) -> None:
    """A process of its own has a span, and ends; paths among the words are below `folder`."""
    command, environment = [sys.executable, "-c", SENDER, *words], {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=folder, env=environment, check=True, timeout=120.0, capture_output=True)


class Collector(BaseHTTPRequestHandler):
    """Keeps what is posted: its path, and itself."""

    posted: ClassVar[list[tuple[str, bytes]]] = []

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        self.posted.append((self.path, data))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 # its name there
        pass


@contextmanager
def collecting() -> Iterator[str]:
    """Give HOST:PORT of a collector."""
    Collector.posted.clear()
    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        serving = threading.Thread(target=server.serve_forever, daemon=True)
        serving.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            serving.join(10)


def test_a_process_sends_its_spans_to_the_collector_before_it_ends(tmp_path: Path) -> None:
    with collecting() as address:
        send(tmp_path, "--traces", f"http://{address}")
    ((path, data),) = Collector.posted
    assert path == "/v1/traces"
    assert b"specwire-verifier" in data
    assert b"a span" in data
