"""The text form, held against Prometheus' own rules, and the listener over a real socket."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bench.harness.certificates import Authority
from specwire.core.invalid import InvalidParameter
from specwire.rpc.server import ListenError
from specwire.rpc.server_options import check_metrics
from specwire.rpc.tls import ServerTls
from specwire.telemetry.metrics import (
    MOST_HEAD_BYTES,
    Families,
    MetricsListener,
    Registry,
    by_label,
    counter,
    gauge,
    histogram,
    listen,
    process_families,
)
from specwire.telemetry.tally import Histogram
from tests.wait import raised, until


def test_a_page_says_each_familys_text_and_type_once_and_whose_each_sample_is() -> None:
    registry = Registry()
    registry.add("verifier", lambda: [counter("steps_total", "Steps.", 3), counter("other_total", "Other.", 0.5)])
    registry.add("drafter", lambda: [counter("steps_total", "Steps.", 4)])
    assert registry.text().splitlines() == [
        "# HELP specwire:steps_total Steps.",
        "# TYPE specwire:steps_total counter",
        'specwire:steps_total{service="verifier"} 3.0',
        'specwire:steps_total{service="drafter"} 4.0',
        "# HELP specwire:other_total Other.",
        "# TYPE specwire:other_total counter",
        'specwire:other_total{service="verifier"} 0.5',
    ]


def test_labels_are_escaped() -> None:
    registry = Registry()
    registry.add("x", lambda: [by_label(gauge, "g", "G.", "name", {'a"b\\c\nd': 1})])
    assert registry.text().splitlines()[-1] == r'specwire:g{name="a\"b\\c\nd",service="x"} 1.0'


def test_a_histogram_counts_a_value_in_the_first_bucket_that_is_not_below_it() -> None:
    values = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 7.0):
        values.observe(value)
    values.observe(0.5, times=2)
    family = histogram("h", "H.", values)
    assert [(sample.name, sample.labels.get("le"), sample.value) for sample in family.samples] == [
        ("h_bucket", "0.1", 2),
        ("h_bucket", "1", 5),
        ("h_bucket", "+Inf", 6),
        ("h_count", None, 6),
        ("h_sum", None, pytest.approx(8.65)),
    ]


def test_every_process_has_its_figures() -> None:
    figures = {family.samples[0].name: family.samples[0].value for family in process_families()}
    assert figures["process_resident_memory_bytes"] > 1e6
    assert figures["process_cpu_seconds_total"] > 0
    assert figures["process_start_time_seconds"] < time.time()
    assert figures["build_info"] == 1


@pytest.mark.parametrize("address", ["", "127.0.0.1:0", "localhost:9400", "[::1]:9400"])
def test_figures_are_read_on_loopback(address: str) -> None:
    assert check_metrics(address, insecure=False) == address


@pytest.mark.parametrize("address", ["9400", "127.0.0.1:x", "0.0.0.0:9400", "10.0.0.1:9400"])
def test_and_elsewhere_only_where_somebody_says_so(address: str) -> None:
    with pytest.raises(InvalidParameter, match="metrics"):
        check_metrics(address, insecure=False)
    if address.endswith(":9400"):
        assert check_metrics(address, insecure=True) == address
        assert check_metrics(address, insecure=False, tls=Authority().server()) == address


async def ask(address: str, request: bytes, tls: ssl.SSLContext | None = None) -> bytes:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=tls)
    try:
        writer.write(request)
        async with asyncio.timeout(60.0):
            return await reader.read()
    finally:
        writer.close()


def figures() -> Families:
    return [counter("steps_total", "Steps.", 3)]


def failing() -> Families:
    raise RuntimeError("no figures")


@asynccontextmanager
async def listening(registry: Registry, tls: ServerTls | None = None) -> AsyncIterator[MetricsListener]:
    listener = await listen(registry, "127.0.0.1:0", tls)
    try:
        yield listener
    finally:
        await listener.stop()


async def test_the_listener_answers_one_request_a_connection() -> None:
    registry = Registry()
    registry.add("verifier", figures)
    async with listening(registry) as listener:
        page = await ask(listener.address, b"GET /metrics?x=1 HTTP/1.1\r\nHost: x\r\n\r\n")
        assert page.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4")
        assert page.endswith(b'specwire:steps_total{service="verifier"} 3.0\n')
        assert (await ask(listener.address, b"HEAD /metrics HTTP/1.1\r\n\r\n")).endswith(b"\r\n\r\n")
        assert (await ask(listener.address, b"GET /health HTTP/1.0\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        assert (await ask(listener.address, b"GET /else HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 404 ")
        assert (await ask(listener.address, b"POST /metrics HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 405 ")
        assert (await ask(listener.address, b"\x16\x03\x01\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
        assert (await ask(listener.address, b"GET /" + b"x" * 2 * MOST_HEAD_BYTES + b"\r\n\r\n"))[:12] in (
            b"HTTP/1.1 400",
            b"",
        )
        registry.add("verifier", failing)
        assert (await ask(listener.address, b"GET /metrics HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 500 ")


async def test_where_the_service_encrypts_both_sides_show_certificates(tmp_path: Path) -> None:
    ours, others = Authority(), Authority("another authority")
    trusting, certified, strange = (ssl.create_default_context(cadata=ours.pem.decode()) for _ in range(3))
    certified.load_cert_chain(*ours.sign().save(tmp_path, "ours"))
    strange.load_cert_chain(*others.sign().save(tmp_path, "others"))
    request = b"GET /health HTTP/1.1\r\n\r\n"
    async with (
        listening(Registry(), ours.server()) as open_to_all,
        listening(Registry(), ours.server(client_ca=ours)) as closed,
    ):
        assert closed.url == f"https://{closed.address}"
        assert (await ask(open_to_all.address, request, trusting)).startswith(b"HTTP/1.1 200 ")
        assert (await ask(closed.address, request, certified)).startswith(b"HTTP/1.1 200 ")
        for refused in (trusting, strange):
            assert await refusal(closed.address, request, refused)
        assert await refusal(open_to_all.address, request)
        assert await refusal(open_to_all.address, request, ssl.create_default_context(cadata=others.pem.decode()))


async def refusal(address: str, request: bytes, tls: ssl.SSLContext | None = None) -> bool:
    """Whether the connection ends without an answer. A client's certificate is looked at after its own handshake."""
    try:
        return await ask(address, request, tls) == b""
    except OSError:  # ssl's errors are such, too
        return True


async def test_a_taken_port_is_an_error_that_names_it() -> None:
    async with listening(Registry()) as listener:
        await raised(ListenError, listen(Registry(), listener.address), f"metrics: cannot listen on {listener.address}")


async def test_stopping_ends_connections_that_say_nothing() -> None:
    listener = await listen(Registry(), "127.0.0.1:0")
    host, _, port = listener.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    await ask(listener.address, b"GET /health HTTP/1.1\r\n\r\n")
    await listener.stop()
    async with asyncio.timeout(60.0):
        assert await reader.read() == b""
    writer.close()


async def test_who_asks_and_does_not_read_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specwire.telemetry.metrics.REQUEST_LIMIT_S", 0.1)
    registry = Registry()
    registry.add("verifier", lambda: [counter("steps_total", "x" * (32 << 20), 3)])  # more than any socket takes
    async with listening(registry) as listener:
        host, _, port = listener.address.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
        await until(lambda: listener._connections)
        async with asyncio.timeout(60.0):
            await asyncio.gather(*listener._connections)
        writer.close()
