"""The one exception of the client."""

from __future__ import annotations

import grpc

from specwire.rpc.channel import unreachable
from specwire.rpc.retry import retry_after


class SpecwireError(Exception):
    """A call failed, or was refused before it was sent.

    Attributes:
        message: one sentence.
        retry_after: seconds after which the server wants to be asked again; None if it does not say.
    """

    def __init__(self, code: grpc.StatusCode, message: str, retry_after: float | None = None) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.retry_after = retry_after


def from_rpc(error: grpc.RpcError, address: str, *, tls: bool = False) -> SpecwireError:
    """What gRPC raised, for a reader; `error` is a finished call, blocking or of asyncio, to an address with `tls`."""
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.UNAVAILABLE:
        details = unreachable(details, address, tls=tls) or details
    return SpecwireError(code, details or f"the call to {address} failed", retry_after(error))


def closed() -> SpecwireError:
    return SpecwireError(grpc.StatusCode.CANCELLED, "the client was closed")


def invalid(field: str, message: str) -> SpecwireError:
    return SpecwireError(grpc.StatusCode.INVALID_ARGUMENT, f"{field}: {message}")
