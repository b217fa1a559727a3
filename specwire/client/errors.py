"""The one exception of the client."""

from __future__ import annotations

import grpc

from specwire.rpc.channel import unreachable
from specwire.rpc.errors import retry_after


class SpecwireError(Exception):
    """A call failed, or was refused before it was sent.

    Attributes:
        message: one sentence.
        retry_after: seconds after which the server wants to be asked again; None if it does not say.
        reached: False if no connection to the service could be made.
    """

    def __init__(
        self, code: grpc.StatusCode, message: str, retry_after: float | None = None, *, reached: bool = True
    ) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.retry_after = retry_after
        self.reached = reached


def from_rpc(error: grpc.RpcError, address: str, *, tls: bool = False) -> SpecwireError:
    """What gRPC raised, for a reader; `error` is a finished call, blocking or of asyncio, to an address with `tls`."""
    code, details = error.code(), error.details() or ""
    nobody = unreachable(details, address, tls=tls) if code is grpc.StatusCode.UNAVAILABLE else None
    message = nobody or details or f"the call to {address} failed"
    return SpecwireError(code, message, retry_after(error), reached=nobody is None)


def closed() -> SpecwireError:
    return SpecwireError(grpc.StatusCode.CANCELLED, "the client was closed")


def invalid(field: str, message: str) -> SpecwireError:
    return SpecwireError(grpc.StatusCode.INVALID_ARGUMENT, f"{field}: {message}")
