"""When to ask again: google.rpc.RetryInfo in a status, where clients of gRPC in any language look for it."""

from __future__ import annotations

from typing import cast

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

Metadata = tuple[tuple[str, str | bytes], ...]


def retry_metadata(code: grpc.StatusCode, message: str, seconds: float) -> Metadata:
    """Trailing metadata that tell a call ending with this status to come again after `seconds`."""
    info = error_details_pb2.RetryInfo()
    info.retry_delay.FromNanoseconds(round(seconds * 1e9))
    detail = any_pb2.Any()
    detail.Pack(info)
    status = status_pb2.Status(code=code.value[0], message=message, details=[detail])
    metadata: Metadata = rpc_status.to_status(status).trailing_metadata
    return metadata


def retry_after(error: grpc.RpcError) -> float | None:
    """Seconds after which the server wants to be asked again; None if it does not say, or not so that it can be read.

    `error` is a finished call, blocking or of asyncio.
    """
    try:
        status = rpc_status.from_call(cast(grpc.Call, error))
    except (DecodeError, ValueError):  # ValueError: it says another code or message than the call's
        return None
    for detail in status.details if status is not None else ():
        info = error_details_pb2.RetryInfo()
        if detail.Is(info.DESCRIPTOR) and detail.Unpack(info):
            return max(0.0, float(info.retry_delay.ToNanoseconds()) / 1e9)
    return None
