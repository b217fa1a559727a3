"""At the door of a server: who may call which service, and how much it may say in one message."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
import grpc.aio

from specwire.rpc.errors import Continuation, Handler, StatusError, kind_of
from specwire.rpc.keys import Keys
from specwire.rpc.options import MOST_MESSAGE_BYTES


class MessageTooLong(StatusError):
    """A caller's message exceeds what its service takes."""

    def __init__(self, size: int, most: int) -> None:
        super().__init__(grpc.StatusCode.RESOURCE_EXHAUSTED, f"request: {size} bytes, at most {most} are taken")


@dataclass(frozen=True, slots=True)
class Admission:
    """keys: who may call; None: everybody. most_bytes: of one message, below the cap of every message."""

    keys: Keys | None = None
    most_bytes: int = MOST_MESSAGE_BYTES


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic at run time
    """To be called within ErrorPolicy, which turns what this raises into statuses.

    Args:
        services: by full name. Others, which are health checks and reflection, are open to everybody.
    """

    def __init__(self, services: Mapping[str, Admission]) -> None:
        self._services = services

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        handler = await continuation(handler_call_details)
        admission = self._services.get(handler_call_details.method.rpartition("/")[0].lstrip("/"))
        if handler is None:  # an unknown method
            return handler
        if admission is None:
            return handler
        if admission.keys is not None:
            try:
                admission.keys.holder(handler_call_details.invocation_metadata)
            except StatusError as error:
                return _refusing(handler, error)
        return _bounded(handler, admission.most_bytes)


def _refusing(handler: Handler, error: StatusError) -> Handler:
    """A handler of the same kind that reads nothing."""

    async def refuse(*_: object) -> NoReturn:
        raise error

    return _rebuilt(handler, refuse, None)


def _bounded(handler: Handler, most: int) -> Handler:
    deserialize = handler.request_deserializer

    def decode(data: bytes) -> object:
        if len(data) > most:
            raise MessageTooLong(len(data), most)
        return data if deserialize is None else deserialize(data)

    return _rebuilt(handler, getattr(handler, kind_of(handler)), decode)


def _rebuilt(handler: Handler, behaviour: Any, decode: Any) -> Handler:
    make = getattr(grpc, f"{kind_of(handler)}_rpc_method_handler")
    result: Handler = make(behaviour, decode, handler.response_serializer)
    return result
