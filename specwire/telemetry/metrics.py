"""Figures that every process has, and the listener that shows them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from operator import attrgetter
from typing import Any

from prometheus_client import PROCESS_COLLECTOR, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from specwire import __version__
from specwire.core.messages import SourceKind
from specwire.rpc.server import ListenError, dialled, parse_listen
from specwire.rpc.tls import Certification, ServerTls, shown_in
from specwire.telemetry.tally import DraftCounts, Histogram

# ----------------------------------------------------------------------------------------------------------------------
# Figures in Prometheus' text form, version 0.0.4.
#
# Nothing is pushed: counters are plain numbers, and `Families` are made of them at a scrape. So counting costs an
# addition without a lock, and a service that is not scraped pays for nothing else.

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "specwire:"
# Names that have it already are another server's, for tools that know only those.
VLLM = "vllm:"

Families = Iterable[Metric]
counter = CounterMetricFamily
gauge = GaugeMetricFamily


def histogram(name: str, text: str, values: Histogram) -> Metric:
    return HistogramMetricFamily(name, text, values.buckets(), values.sum)


def by_labels(
    kind: type[CounterMetricFamily | GaugeMetricFamily],
    name: str,
    text: str,
    labels: Sequence[str],
    samples: Iterable[tuple[Sequence[str], float]],
) -> Metric:
    """samples: the labels' values, and what counts for them."""
    family = kind(name, text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def by_label(
    kind: type[CounterMetricFamily | GaugeMetricFamily], name: str, text: str, label: str, values: Mapping[str, float]
) -> Metric:
    """One sample for each value of the label, in their order."""
    return by_labels(kind, name, text, (label,), (((each,), value) for each, value in values.items()))


def draft_families(drafts: Mapping[SourceKind, DraftCounts]) -> Families:
    """Samples of draft tokens and what became of them, by who proposed them."""
    told = (
        ("draft", "Draft tokens put to the target, by where they came from.", attrgetter("proposed")),
        ("tested", "Of these, those that were judged, all before them having been accepted.", attrgetter("tested")),
        ("accepted", "Of these, those that were accepted.", attrgetter("accepted")),
    )
    for name, text, of in told:
        values = {kind.name.lower(): of(counts) for kind, counts in drafts.items()}
        yield by_label(counter, f"spec_decode_num_{name}_tokens_total", text, "kind", values)


class Registry(Collector):
    """The metrics of one process, which may run several services: every sample has the label `service`."""

    def __init__(self) -> None:
        self._services: list[tuple[str, Callable[[], Families]]] = []

    def add(self, service: str, families: Callable[[], Families]) -> None:
        """Add a source, which `families` reads at each scrape."""
        self._services.append((service, families))

    def include(self, other: Registry, service: str = "") -> None:
        """Add the sources that `other` has by now, as `service`'s if it is named."""
        self._services += [(service or own, families) for own, families in other._services]

    def collect(self) -> Families:
        """Families of one name are merged; the first one's help text counts."""
        shown: dict[str, Metric] = {}
        for service, families in self._services:
            for family in families():
                prefix = "" if family.name.startswith(VLLM) else PREFIX
                name = prefix + family.name
                whole = shown.setdefault(name, Metric(name, family.documentation, family.type))
                for sample in family.samples:
                    whole.add_sample(prefix + sample.name, {"service": service, **sample.labels}, sample.value)
        return shown.values()

    def text(self) -> str:
        return generate_latest(self).decode()


def process_families() -> Families:
    yield by_label(gauge, "build_info", "1; what runs.", "version", {__version__: 1})
    yield from PROCESS_COLLECTOR.collect()


# ----------------------------------------------------------------------------------------------------------------------
# A small HTTP listener: GET /metrics, and /health. Ours, for services that speak gRPC otherwise.
#
# It shows no text and no prompt, and asks nobody for a token. Where the service encrypts, so does it, and asks for the
# same certificates; the loopback rule of all listeners holds.

logger = logging.getLogger(__name__)

# A scrape is one short request; slower or larger ones are cut off.
REQUEST_LIMIT_S = 5.0
MOST_HEAD_BYTES = 8 * 1024
MOST_CONNECTIONS = 32
# Seconds for the other end to close, which TLS waits for.
GOODBYE_S = 1.0

PLAIN = "text/plain; charset=utf-8"
HEAD_END = b"\r\n\r\n"


class MetricsListener:
    """`address` is HOST:PORT as a client on this machine dials it, `url` the same with its scheme.

    Owns its connections: `stop` ends them.
    """

    def __init__(
        self, registry: Registry, server: asyncio.Server, connections: set[asyncio.Task[None]], scheme: str
    ) -> None:
        self.registry = registry
        self.address = dialled(*server.sockets[0].getsockname()[:2])
        self.url = f"{scheme}://{self.address}"
        self._server = server
        self._connections = connections

    async def stop(self) -> None:
        """Idempotent."""
        self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)


async def listen(registry: Registry, address: str, tls: ServerTls | None = None) -> MetricsListener:
    """Serve figures at HOST:PORT; tls: of the service whose they are, None for plain HTTP.

    Raises ListenError: the address cannot be used.
    """
    host, port = parse_listen(address)
    connections: set[asyncio.Task[None]] = set()
    certification = Certification(tls)

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        trusted = certification.holds(lambda: shown_in(writer.get_extra_info("ssl_object")))
        if not trusted or len(connections) >= MOST_CONNECTIONS:
            writer.close()
            return
        task = asyncio.ensure_future(_serve(registry, reader, writer))
        connections.add(task)
        task.add_done_callback(connections.discard)

    try:
        server = await asyncio.start_server(connected, host, port, limit=MOST_HEAD_BYTES, **_encryption(tls))
    except OSError as error:
        raise ListenError(f"metrics: cannot listen on {address}: {error.strerror}") from error
    listener = MetricsListener(registry, server, connections, "http" if tls is None else "https")
    logger.info("figures are at %s/metrics", listener.url)
    return listener


def _encryption(tls: ServerTls | None) -> dict[str, Any]:
    """TLS options for asyncio. A client that does not finish its handshake in time is cut off."""
    if tls is None:
        return {}
    return {"ssl": tls.context(), "ssl_handshake_timeout": REQUEST_LIMIT_S, "ssl_shutdown_timeout": GOODBYE_S}


async def _serve(registry: Registry, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Read one request and answer it."""
    try:
        async with asyncio.timeout(REQUEST_LIMIT_S):
            try:
                head = await reader.readuntil(HEAD_END)
            except asyncio.LimitOverrunError:
                head = b""
            writer.write(answer(registry, head))
            await writer.drain()
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return  # it left, or took its time
    finally:
        await _hang_up(writer)


async def _hang_up(writer: asyncio.StreamWriter) -> None:
    """Close the connection without waiting for a client that does not read its answer."""
    writer.close()
    with suppress(OSError, TimeoutError, asyncio.CancelledError):
        async with asyncio.timeout(REQUEST_LIMIT_S):
            await writer.wait_closed()
    writer.transport.abort()


def answer(registry: Registry, head: bytes) -> bytes:
    """Status, body and type of the answer to a request's line and headers."""
    words = head.split(b"\r\n", 1)[0].split()
    if len(words) != 3 or not words[2].startswith(b"HTTP/"):
        return _response(400, "this is no HTTP request\n")
    if words[0] not in (b"GET", b"HEAD"):
        return _response(405, "only GET\n")
    status, text, kind = _page(registry, words[1].split(b"?", 1)[0])
    return _response(status, text, kind, body=words[0] == b"GET")


def _page(registry: Registry, path: bytes) -> tuple[int, str, str]:
    if path == b"/health":
        return 200, "ok\n", PLAIN
    if path != b"/metrics":
        return 404, "there are /metrics and /health\n", PLAIN
    try:
        return 200, registry.text(), CONTENT_TYPE
    except Exception:
        logger.exception("the figures could not be gathered")
        return 500, "the figures could not be gathered; the log says why\n", PLAIN


def _response(status: int, text: str, kind: str = PLAIN, body: bool = True) -> bytes:
    data = text.encode()
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (data if body else b"")
