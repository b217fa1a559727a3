"""Keys, tokens and certificates that change while they are in use: who is let in afterwards, and who is ended."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cryptography import x509

from bench.harness.certificates import Authority, Signed
from specwire.core.invalid import InvalidParameter
from specwire.rpc import renewal
from specwire.rpc.channel import open_channel
from specwire.rpc.errors import Context, StatusError
from specwire.rpc.keys import Keys, Token, read_keys, read_peer_token, read_token, show, text_of
from specwire.rpc.renewal import Origin, Renewal
from specwire.rpc.server import RunningServer, serve
from specwire.rpc.tls import ClientTls, client_tls, is_issued, server_tls
from specwire.telemetry.metrics import Registry, listen
from tests.options import parsed, private
from tests.rpc.byte_server import method, service
from tests.wait import raised, until

ADA, BOB, NEW = "the-token-of-ada", "the-token-of-bob", "another-token-of-ada"
LIMIT_S = 120.0
KINDS = ["unary_stream", "stream_stream"]


def keys_of(**holders: str) -> str:
    return "".join(f"{name} {token}\n" for name, token in holders.items())


def keys_in(file: Path, **holders: str) -> tuple[Keys, Origin[Keys]]:
    """Those of a file that is written for it, and where they are from."""
    keys = read_keys("--api-keys", private(file, keys_of(**holders)))
    assert keys is not None
    assert keys.origin is not None
    return keys, keys.origin


def known(keys: Keys) -> list[str]:
    """Who of the three tokens' holders may call."""
    found = []
    for token in (ADA, BOB, NEW):
        try:
            found.append(keys.holder(show(token)))
        except StatusError:
            found.append("")
    return found


# What stands in files by now


def test_keys_are_those_of_the_file_as_it_is(tmp_path: Path) -> None:
    keys, origin = keys_in(tmp_path / "keys", ada=ADA, bob=BOB)
    assert not origin.look()
    private(tmp_path / "keys", keys_of(ada=NEW, carl=BOB))
    assert known(keys) == ["ada", "bob", ""]  # nobody has looked yet
    assert origin.look()
    assert known(keys) == ["", "carl", "ada"]
    assert keys.names == {"ada", "carl"}


@pytest.mark.parametrize(
    ("content", "mode", "why"),
    [
        ("", 0o600, "holds no key"),
        ("ada the-token-of", 0o644, "is open to others"),
        (f"ada {ADA}\nbob", 0o600, "line 2: must be NAME TOKEN"),
        (None, 0, "cannot be read"),
    ],
    ids=["empty", "open to others", "half written", "gone"],
)
def test_a_file_that_is_wrong_changes_nothing_until_it_is_right(
    content: str | None, mode: int, why: str, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    keys, origin = keys_in(file, ada=ADA)
    if content is None:
        file.unlink()
    else:
        private(file, content, mode)
    with pytest.raises(InvalidParameter, match=why) as told:
        origin.look()
    assert ADA not in str(told.value)
    assert known(keys) == ["ada", "", ""]
    private(file, keys_of(ada=NEW))
    assert origin.look()
    assert known(keys) == ["", "", "ada"]


def test_a_change_within_one_time_stamp_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    keys, origin = keys_in(file, ada=ADA)
    private(file, keys_of(ada=BOB))
    assert origin.look()
    stamp = file.stat().st_mtime_ns
    with file.open("r+") as same:  # as long as before, in place
        same.write(keys_of(bob=ADA))
    os.utime(file, ns=(stamp, stamp))
    assert origin.look()
    assert known(keys) == ["bob", "", ""]


def test_a_file_that_changes_while_it_is_read_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "one"
    file.write_text("1")
    written = iter(["2", "3"])

    def read() -> str:
        text = file.read_text()
        more = next(written, None)
        if more is not None:
            private(file, more)
        return text

    origin = Origin([str(file)], read)
    assert origin.latest == "1"
    assert not origin.look()  # it read 2, and then there was 3
    assert origin.latest == "1"
    assert origin.look()
    assert origin.latest == "3"


def test_a_token_is_the_one_of_the_file(tmp_path: Path) -> None:
    token = read_peer_token(parsed("client", "--token-file", private(tmp_path / "token", ADA)))
    assert token.origin is not None
    private(tmp_path / "token", NEW)
    assert (text_of(token), token.origin.look(), text_of(token)) == (ADA, True, NEW)
    assert ADA not in repr(token)
    nothing = read_peer_token(parsed("client"))
    assert (nothing, bool(nothing), text_of(nothing), text_of(ADA)) == (Token(), False, "", ADA)


async def test_a_file_that_is_wrong_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renewal, "LOOK_EVERY_S", 0.01)
    (keys, origin), looks = keys_in(tmp_path / "keys", ada=ADA), 0

    def look() -> bool:
        nonlocal looks
        looks += 1
        return looked()

    looked, origin.look = origin.look, look  # type: ignore[method-assign]  # to count

    changes: list[list[str]] = []
    with caplog.at_level(logging.WARNING):
        watching = Renewal([None, origin], lambda: changes.append(known(keys)))
        private(tmp_path / "keys", "ada")
        await until(lambda: "must be NAME TOKEN" in caplog.text)
        seen = looks
        await until(lambda: looks > seen + 10)
        private(tmp_path / "keys", keys_of(bob=BOB))
        await until(lambda: changes)
        await watching.stop()
    assert changes == [["", "bob", ""]]
    assert caplog.text.count("what was read before stays in use") == 1
    assert BOB not in caplog.text


# Calls that run


@asynccontextmanager
async def serving(tls: Any = None, keys: Keys | None = None) -> AsyncIterator[RunningServer]:
    async def count(_: Any, context: Context) -> AsyncIterator[bytes]:
        number = 0
        while True:
            yield str(number).encode()
            number += 1
            await asyncio.sleep(0.001)

    async def flood(_: Any, context: Context) -> None:
        while True:
            await context.write(bytes(1 << 20))

    async def echo(request: bytes, context: Context) -> bytes:
        return request

    offered = service(Count=("unary_stream", count), Flood=("stream_stream", flood), Echo=("unary_unary", echo))
    server = await serve([replace(offered, keys=keys)], "127.0.0.1:0", tls=tls)
    try:
        yield server
    finally:
        await server.stop(0.0)


def begun(channel: grpc.aio.Channel, kind: str) -> Any:
    if kind == "unary_stream":
        return method(channel, kind, "Count")(b"", timeout=LIMIT_S)
    return method(channel, kind, "Flood")(timeout=LIMIT_S)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_key_that_is_revoked_ends_its_calls_and_no_others(kind: str, tmp_path: Path) -> None:
    keys, origin = keys_in(tmp_path / "keys", ada=ADA, bob=BOB)
    async with (
        serving(keys=keys) as server,
        open_channel(server.address, token=ADA) as ada,
        open_channel(server.address, token=BOB) as bob,
    ):
        hers, his = begun(ada, kind), begun(bob, kind)
        assert all([await hers.read(), await his.read()])
        private(tmp_path / "keys", keys_of(bob=BOB))
        assert origin.look()
        server.recheck()
        server.recheck()
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            while isinstance(await hers.read(), bytes):
                pass
        assert ended.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert ended.value.details() == "authorization: this token is not known here"
        refused = await raised(grpc.aio.AioRpcError, method(ada, "unary_unary", "Echo")(b"x", timeout=LIMIT_S))
        assert refused.code() is grpc.StatusCode.UNAUTHENTICATED
        for _ in range(20):
            assert isinstance(await his.read(), bytes)
        his.cancel()
        assert await method(bob, "unary_unary", "Echo")(b"x", timeout=LIMIT_S) == b"x"


# Certificates


class Files:
    """A server's certificate and the authorities of its clients, in files."""

    def __init__(self, folder: Path, ours: Authority, *clients: Authority) -> None:
        self._folder = folder
        self.serve(ours.sign())
        self.trust(*clients)
        names = ("--tls-cert", "cert.pem", "--tls-key", "cert.key", "--tls-client-ca", "clients.pem")
        flags = [each if each.startswith("--") else str(folder / each) for each in names]
        tls = server_tls(parsed("orchestrate", *flags))
        assert tls is not None
        assert tls.origin is not None
        self.tls, self.origin = tls, tls.origin

    def serve(self, signed: Signed) -> None:
        private(self._folder / "cert.pem", signed.certificate)
        private(self._folder / "cert.key", signed.key)

    def trust(self, *clients: Authority) -> None:
        private(self._folder / "clients.pem", b"".join(each.pem for each in clients))


def client(ours: Authority, shown: Signed) -> ClientTls:
    return ClientTls(ours.pem, shown.certificate, shown.key)


async def test_a_certificate_of_a_removed_authority_ends_its_calls_and_no_others(tmp_path: Path) -> None:
    ours, left, gone = Authority("ours"), Authority("left"), Authority("gone")
    files = Files(tmp_path, ours, left, gone)
    async with (
        serving(files.tls) as server,
        open_channel(server.address, client(ours, left.sign())) as ada,
        open_channel(server.address, client(ours, gone.sign())) as bob,
    ):
        hers, his = begun(ada, "unary_stream"), begun(bob, "unary_stream")
        assert all([await hers.read(), await his.read()])
        files.trust(left)
        assert files.origin.look()
        server.recheck()
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            while True:
                await his.read()
        assert ended.value.code() is grpc.StatusCode.UNAUTHENTICATED
        # Over the connection that it has still.
        refused = await raised(grpc.aio.AioRpcError, method(bob, "unary_unary", "Echo")(b"x", timeout=LIMIT_S))
        assert refused.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "certificate" in (refused.details() or "")
        for _ in range(20):
            assert isinstance(await hers.read(), bytes)
        assert await method(ada, "unary_unary", "Echo")(b"x", timeout=LIMIT_S) == b"x"
        async with open_channel(server.address, client(ours, gone.sign())) as again:
            shut = await raised(grpc.aio.AioRpcError, method(again, "unary_unary", "Echo")(b"x", timeout=LIMIT_S))
            assert shut.code() is grpc.StatusCode.UNAVAILABLE


def presented(address: str, trusted: Authority) -> int:
    """The serial number of the certificate that a new connection is shown."""
    host, port = address.rsplit(":", 1)
    return x509.load_pem_x509_certificate(ssl.get_server_certificate((host, int(port))).encode()).serial_number


async def test_a_renewed_certificate_is_shown_to_new_connections(tmp_path: Path) -> None:
    ours, second = Authority("ours"), Authority("second")
    Files(tmp_path, ours, ours)
    ca = private(tmp_path / "ca.pem", ours.pem)
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "cert.key")
    args = parsed("orchestrate", "--tls-cert", cert, "--tls-key", key, "--tls-ca", ca)
    tls, dialled = server_tls(args), client_tls(args)
    assert tls is not None
    assert dialled is not None
    assert tls.origin is not None
    assert dialled.origin is not None
    figures = await listen(Registry(), "127.0.0.1:0", tls)
    async with serving(tls) as server, open_channel(server.address, dialled) as channel:
        call = begun(channel, "unary_stream")
        assert await call.read() == b"0"
        renewed = second.sign()
        serial = x509.load_pem_x509_certificate(renewed.certificate).serial_number
        before = [await asyncio.to_thread(presented, each.address, ours) for each in (server, figures)]
        private(tmp_path / "cert.pem", renewed.certificate)
        with pytest.raises(InvalidParameter, match="is not the key of the certificate"):
            tls.origin.look()  # between the two files
        assert [await asyncio.to_thread(presented, each.address, ours) for each in (server, figures)] == before
        private(tmp_path / "cert.key", renewed.key)
        assert tls.origin.look()
        server.recheck()
        after = [await asyncio.to_thread(presented, each.address, ours) for each in (server, figures)]
        assert after == [serial] * 2 != before
        assert isinstance(await call.read(), bytes)  # the old connection goes on
        async with open_channel(server.address, dialled) as distrusting:
            await raised(grpc.aio.AioRpcError, method(distrusting, "unary_unary", "Echo")(b"x", timeout=LIMIT_S))
        private(tmp_path / "ca.pem", second.pem)
        assert dialled.origin.look()
        async with open_channel(server.address, dialled) as trusting:
            assert await method(trusting, "unary_unary", "Echo")(b"x", timeout=LIMIT_S) == b"x"
    await figures.stop()


def test_who_is_issued_by_whom() -> None:
    root, namesake = Authority("root"), Authority("root")
    between = Authority("between", above=root)
    near, far = root.sign().certificate, between.sign().certificate
    assert is_issued(near, b"", namesake.pem + root.pem)
    assert not is_issued(near, b"", namesake.pem)
    assert is_issued(far, between.pem, root.pem)
    assert is_issued(far, b"", between.pem)
    assert not is_issued(far, b"", root.pem)
    assert not is_issued(far, between.pem, namesake.pem)
    assert is_issued(ssl.PEM_cert_to_DER_cert(near.decode()), b"", root.pem)
    assert is_issued(root.pem, b"", root.pem)
    assert not is_issued(near, b"", b"")
    assert not is_issued(b"", b"", root.pem)


# ----------------------------------------------------------------------------------------------------------------------
# Files of tokens, what is wrong with them, and who is known by which token.

ONE, TWO = "one-token-of-length", "two-token-of-length"


def test_each_token_is_its_holders(tmp_path: Path) -> None:
    file = private(tmp_path / "keys", f"# who may call\n\nada {ONE}\n  bob\t{TWO}\nada ada-has-a-second-one\n", 0o640)
    keys = read_keys("--api-keys", file)
    assert keys is not None
    assert keys.names == {"ada", "bob"}
    assert [keys.holder(show(token)) for token in (ONE, TWO, "ada-has-a-second-one")] == ["ada", "bob", "ada"]
    assert read_keys("--api-keys", None) is None


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (("authorization", ONE),),
        (("authorization", f"bearer {ONE}"),),
        (("authorization", "Bearer "),),
        (("authorization", f"Bearer {ONE}x"),),
        (("authorization", f"Bearer {ONE[:-1]}"),),
        (("authorization", b"Bearer " + ONE.encode()),),
        (("x-authorization", f"Bearer {ONE}"),),
    ],
)
def test_who_shows_none_or_another_is_not_let_in(metadata: tuple[tuple[str, str | bytes], ...]) -> None:
    with pytest.raises(StatusError) as refused:
        Keys({ONE: "ada", TWO: "bob"}).holder(metadata)
    assert refused.value.code is grpc.StatusCode.UNAUTHENTICATED
    assert ONE not in refused.value.message


def test_no_token_is_kept_or_shown() -> None:
    keys = Keys({ONE: "ada"})
    assert ONE not in repr(vars(keys))


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        ("", 0o600, "FILE holds no key"),
        ("# none\n", 0o600, "FILE holds no key"),
        (f"ada {ONE}\n", 0o644, "FILE is open to others (mode 0644): chmod 600 FILE"),
        (f"ada {ONE}\n", 0o620, "FILE is open to others (mode 0620): chmod 600 FILE"),
        (f"{ONE}\n", 0o600, "FILE, line 1: must be NAME TOKEN"),
        (f"ada {ONE} more\n", 0o600, "FILE, line 1: must be NAME TOKEN"),
        (f"a/b {ONE}\n", 0o600, "FILE, line 1: must be NAME TOKEN"),
        ("\nada secret\n", 0o600, "FILE, line 2: a token has 16 to 512 of the characters"),
        (f"ada {ONE}\nbob {ONE}\n", 0o600, "FILE, line 2: the same token stands in another line"),
        (b"\xff\xfe", 0o600, "FILE is not UTF-8 at byte 0"),
    ],
)
def test_a_file_that_is_no_good_is_named(content: str | bytes, mode: int, message: str, tmp_path: Path) -> None:
    file = private(tmp_path / "keys", content, mode)
    with pytest.raises(InvalidParameter) as refused:
        read_keys("--api-keys", file)
    said = str(refused.value)
    assert said.replace(file, "FILE").startswith(f"--api-keys: {message}")
    assert ONE not in said
    assert "secret" not in said


def test_a_client_has_its_token_from_a_file_or_its_environment(tmp_path: Path) -> None:
    file = private(tmp_path / "token", ONE + "\n")
    assert read_token(parsed("client", "--token-file", file), {"SPECWIRE_TOKEN": TWO}) == ONE
    assert read_token(parsed("client"), {"SPECWIRE_TOKEN": TWO}) == TWO
    assert read_token(parsed("client"), {"SPECWIRE_TOKEN": ""}) == ""
    assert read_token(parsed("client")) == ""
    assert show("") == ()


def test_what_is_no_token_is_refused_unseen(tmp_path: Path) -> None:
    file = private(tmp_path / "token", "two words")
    for args, environment in (
        (parsed("client", "--token-file", file), {}),
        (parsed("client"), {"SPECWIRE_TOKEN": "two words"}),
    ):
        with pytest.raises(InvalidParameter, match="a token has 16 to 512") as refused:
            read_token(args, environment)
        assert "two words" not in str(refused.value)
    with pytest.raises(InvalidParameter, match="--token-file: .*none cannot be read: No such file or directory"):
        read_token(parsed("client", "--token-file", str(tmp_path / "none")))
