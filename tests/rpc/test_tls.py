"""TLS between two processes' ends: who trusts whom, and what those are told that do not; files that are no good."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.harness.certificates import Authority
from specwire.core.invalid import InvalidParameter
from specwire.rpc.channel import open_channel, unreachable
from specwire.rpc.server import RunningServer, serve
from specwire.rpc.tls import ClientTls, ServerTls, client_tls, server_tls, system_authorities
from tests.options import parsed
from tests.rpc.byte_server import service

OURS, OTHERS = Authority(), Authority("another authority")


@asynccontextmanager
async def serving(tls: ServerTls | None) -> AsyncIterator[RunningServer]:
    server = await serve([service()], "127.0.0.1:0", tls=tls)
    try:
        yield server
    finally:
        await server.stop(0.0)


async def answer(address: str, tls: ClientTls | None) -> str:
    """What a health check gets: "" if it is answered, otherwise why not."""
    async with open_channel(address, tls) as channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=120.0)
        except grpc.aio.AioRpcError as error:
            return unreachable(error.details() or "", address, tls=tls is not None) or "unexplained"
    return ""


@pytest.mark.parametrize(
    ("server", "client", "why"),
    [
        (
            OURS.server(),
            OTHERS.client(),
            "the certificate of ADDRESS is not trusted: unable to get local issuer certif",
        ),
        (OURS.server(), ClientTls(), "the certificate of ADDRESS is not trusted: "),
        (OURS.server("10.0.0.1"), OURS.client(), "the certificate of ADDRESS is for another name"),
        (OURS.server(), None, "ADDRESS closed the connection at once: it may want TLS"),
        (None, OURS.client(), "ADDRESS does not speak TLS"),
    ],
    ids=["other authority", "system's authorities", "other name", "plaintext client", "plaintext server"],
)
async def test_ends_that_do_not_fit_say_why(server: ServerTls | None, client: ClientTls | None, why: str) -> None:
    async with serving(server) as running:
        assert (await answer(running.address, client)).startswith(why.replace("ADDRESS", running.address))


async def test_mutual_tls_lets_in_whom_its_authority_signed() -> None:
    async with serving(OURS.server(client_ca=OTHERS)) as server:
        assert await answer(server.address, OURS.client(OTHERS.sign())) == ""
        closed = f"{server.address} closed the connection at once: it may want a client's certificate that it trusts"
        assert await answer(server.address, OURS.client()) == closed
        assert await answer(server.address, OURS.client(OURS.sign())) == closed


async def test_a_server_with_tls_may_be_reached_from_elsewhere() -> None:
    server = await serve([service()], "0.0.0.0:0", tls=OURS.server())
    assert await answer(server.address, OURS.client()) == ""
    await server.stop(0.0)


def test_the_keys_are_not_shown() -> None:
    signed = OURS.sign()
    for shown in (repr(ServerTls(signed.certificate, signed.key)), repr(OURS.client(signed))):
        assert "BEGIN" not in shown


# Command lines


def test_flags_become_what_the_files_hold(tmp_path: Path) -> None:
    signed = OURS.sign()
    cert, key = signed.save(tmp_path, "one")
    ca = OTHERS.save(tmp_path, "ca")
    server = server_tls(parsed("orchestrate", "--tls-cert", cert, "--tls-key", key, "--tls-client-ca", ca))
    assert server == ServerTls(signed.certificate, signed.key, OTHERS.pem)
    assert client_tls(parsed("orchestrate", "--tls")) == ClientTls()
    client = client_tls(parsed("orchestrate", "--tls-ca", ca, "--tls-client-cert", cert, "--tls-client-key", key))
    assert client == ClientTls(OTHERS.pem, signed.certificate, signed.key)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tls-cert", "GOOD"], "--tls-key: must come with --tls-cert"),
        (["--tls-key", "KEY"], "--tls-cert: must come with --tls-key"),
        (["--tls-client-ca", "GOOD"], "--tls-client-ca: needs --tls-cert and --tls-key"),
        (["--tls-client-cert", "GOOD"], "--tls-client-key: must come with --tls-client-cert"),
        (["--tls-cert", "NONE", "--tls-key", "KEY"], "--tls-cert: NONE cannot be read: No such file or directory"),
        (["--tls-cert", "GOOD", "--tls-key", "NONE"], "--tls-key: NONE cannot be read: No such file or directory"),
        (["--tls-cert", "JUNK", "--tls-key", "KEY"], "--tls-cert: JUNK holds no certificate in PEM"),
        (["--tls-cert", "GOOD", "--tls-key", "JUNK"], "--tls-key: JUNK holds no private key in PEM without a password"),
        (["--tls-cert", "GOOD", "--tls-key", "OTHER"], "--tls-key: OTHER is not the key of the certificate in GOOD"),
        (["--tls-cert", "GOOD", "--tls-key", "KEY", "--tls-client-ca", "JUNK"], "--tls-client-ca: JUNK holds no cert"),
        (["--tls-ca", "NONE"], "--tls-ca: NONE cannot be read: No such file or directory"),
        (["--tls-ca", "KEY"], "--tls-ca: KEY holds no certificate in PEM"),
        (["--tls-ca", "."], "--tls-ca: . cannot be read: Is a directory"),
    ],
)
def test_what_is_wrong_is_named_by_flag_and_file(words: list[str], message: str, tmp_path: Path) -> None:
    good, key = OURS.sign().save(tmp_path, "good")
    _, other = OURS.sign().save(tmp_path, "other")
    (tmp_path / "junk").write_bytes(b"\xffnothing")
    files = {"GOOD": good, "KEY": key, "OTHER": other, "JUNK": str(tmp_path / "junk"), "NONE": str(tmp_path / "none")}
    args = parsed("orchestrate", *(files.get(word, word) for word in words))
    with pytest.raises(InvalidParameter) as caught:
        server_tls(args)
        client_tls(args)
    said = str(caught.value)
    for name, file in files.items():
        said = said.replace(file, name)
    assert said.startswith(message)


def test_the_systems_authorities_are_openssls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", OURS.save(tmp_path, "ca"))
    assert system_authorities() == OURS.pem
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none"))
    (tmp_path / "12345678.0").write_bytes(OTHERS.pem)
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))
    assert system_authorities() == OTHERS.pem
