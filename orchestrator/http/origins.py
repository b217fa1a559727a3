"""Checks first of all whether the server answers to the called name, and whether the page's origin may call it.

A page of any site can make its readers' browsers call a server that only they can reach: under an address of its own
(cross-site requests), or under a name of its own that it has pointed at that server (DNS rebinding). The name that was
called is in `Host`, the page's origin in `Origin` (RFC 6454), and neither can be changed by a page's script.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from contextlib import suppress
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.http.errors import INVALID, Failure
from orchestrator.options import ANY, HttpAccess
from specwire.rpc.channel import host_of, is_loopback

# What Sec-Fetch-Site says of pages of other origins.
ELSEWHERE = ("cross-site", "same-site")
LOCALHOST = "localhost"


class OriginCheck:
    """ASGI middleware. A refused caller's body is not read, nor one that no endpoint wanted: then the connection ends.

    listen: HOST:PORT as it was asked for. A host that is an address is always answered to: no other site can have an
    address as its name.
    """

    def __init__(self, app: ASGIApp, access: HttpAccess, listen: str) -> None:
        self._app = app
        self._any_host, self._any_origin = ANY in access.hosts, ANY in access.origins
        self._hosts = frozenset(each.lower() for each in (*access.hosts, *_own_names(host_of(listen))))
        self._origins = frozenset(each.lower() for each in access.origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope.get("headers", ())}
        unread = _has_body(headers)

        async def read() -> Message:
            nonlocal unread
            unread = False
            return await receive()

        async def told(message: Message) -> None:
            if unread and message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        try:
            self._check(scope["method"], headers)
        except Failure as failure:
            await failure.response()(scope, read, told)
            return
        await self._app(scope, read, told)

    def _check(self, method: str, headers: dict[str, str]) -> None:
        """Raises Failure."""
        host, origin = headers.get("host", "").lower(), headers.get("origin", "").lower()
        self._check_host(host)
        if self.allows(origin, host):
            return
        if origin or (method == "POST" and headers.get("sec-fetch-site") in ELSEWHERE):
            message = f"Origin: pages of {origin or 'other sites'} may not call this server; --http-origin allows one"
            raise Failure(403, message, INVALID, None, "cross_site")

    def allows(self, origin: str, host: str) -> bool:
        """Whether the page that calls is this server's own, or one of an origin that was allowed by name.

        A proxy may have ended the encryption, so the scheme of the page is not known here.
        """
        if not origin:
            return False
        return self._any_origin or origin in self._origins or (bool(host) and origin.partition("://")[2] == host)

    def _check_host(self, host: str) -> None:
        """Raises Failure. HTTP/1.0 knows no Host, and no browser of today speaks it."""
        if self._any_host or not host:
            return
        name = _name_of(host)
        if name is None or not (name in self._hosts or name.endswith(f".{LOCALHOST}") or _is_address(name)):
            message = f"Host: this server does not answer to {host!r}; --http-host NAME adds a name"
            raise Failure(421, message, INVALID, None, "unknown_host")


def _own_names(host: str) -> Iterable[str]:
    """Names without a flag: a machine's own only where others may call."""
    return (LOCALHOST, host) if is_loopback(host or LOCALHOST) else (LOCALHOST, host, socket.gethostname())


def _name_of(host: str) -> str | None:
    """Host without the port, and without IPv6's brackets; None where it is no host."""
    with suppress(ValueError):
        parts = urlsplit(f"//{host}")
        if parts.netloc == host and "@" not in host and (parts.port is None or parts.port > 0):
            return (parts.hostname or "").removesuffix(".") or None
    return None


def _is_address(name: str) -> bool:
    with suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    return False


def _has_body(headers: dict[str, str]) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0").strip("0") != ""
