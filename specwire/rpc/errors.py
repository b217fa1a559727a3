"""Error policy: what a caller sees when a handler raises. One interceptor owns it.

InvalidParameter        INVALID_ARGUMENT, "field: what is wrong"
StatusError             its own code and message; RESOURCE_EXHAUSTED with a google.rpc.RetryInfo
cancellation, abort     untouched
a message of bytes that are none of the method's type
                        INVALID_ARGUMENT
anything else           logged with its traceback; the caller gets INTERNAL and a neutral sentence
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any, NoReturn, Self, TypeAlias, cast

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from specwire.core.invalid import MOST_PARTS, InvalidParameter
from specwire.rpc.decoding import NO_MESSAGE, SMALL_BYTES, Deserialize, check_parts, message_type

# ----------------------------------------------------------------------------------------------------------------------
# When to ask again: google.rpc.RetryInfo in a status, where clients of gRPC in any language look for it.

Metadata = tuple[tuple[str, str | bytes], ...]


def retry_metadata(code: grpc.StatusCode, message: str, seconds: float) -> Metadata:
    """Trailing metadata that tell a caller to retry after `seconds`."""
    info = error_details_pb2.RetryInfo()
    info.retry_delay.FromNanoseconds(round(seconds * 1e9))
    detail = any_pb2.Any()
    detail.Pack(info)
    status = status_pb2.Status(code=code.value[0], message=message, details=[detail])
    metadata: Metadata = rpc_status.to_status(status).trailing_metadata
    return metadata


def retry_after(error: grpc.RpcError) -> float | None:
    """Seconds after which the server wants to be asked again; None if it does not say, or unreadably.

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


logger = logging.getLogger(__name__)

# Seconds. Where nothing better is known, a refused caller is told to retry after this.
RETRY_AFTER = 1.0

NEUTRAL_MESSAGE = "internal error; the server's log has the details"
# Characters. A status travels in the trailers, of at most 8 KiB encoded; callers choose what is quoted in it.
MOST_MESSAGE = 400

# gRPC passes messages of whatever type the method has, so the wrappers are generic over them.
Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # a string: not generic at run time
Behaviour = Callable[[Any, Context], Any]
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]"
Received = Callable[[Any], Awaitable[object]]


class StatusError(Exception):
    """A failure with a gRPC status of its own.

    Attributes:
        message: one sentence for the caller.
        retry_after: seconds after which the caller may ask again; RESOURCE_EXHAUSTED always says so.
    """

    def __init__(self, code: grpc.StatusCode, message: str, retry_after: float | None = None) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        if retry_after is None and code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            retry_after = RETRY_AFTER
        self.retry_after = retry_after


def status_of(error: BaseException) -> tuple[grpc.StatusCode, str]:
    """The status and message that a caller is told for `error`; not for cancellation."""
    if isinstance(error, InvalidParameter):
        return grpc.StatusCode.INVALID_ARGUMENT, str(error)
    if isinstance(error, StatusError):
        return error.code, error.message
    return grpc.StatusCode.INTERNAL, NEUTRAL_MESSAGE


def code_number(code: grpc.StatusCode) -> int:
    """The code as in google.rpc.Code, for `Refused.code`."""
    return int(code.value[0])


def code_of(number: int) -> grpc.StatusCode:
    """A failure's code, from its number on the wire; UNKNOWN for one that is none of gRPC's, or no failure's."""
    return next((code for code in grpc.StatusCode if number and code.value[0] == number), grpc.StatusCode.UNKNOWN)


class ErrorPolicy(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic at run time
    """Applies the policy to unary and stream calls of every service on a server."""

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None:  # an unknown method
            return handler
        kind = kind_of(handler)
        guard = _guard_generator if inspect.isasyncgenfunction(getattr(handler, kind)) else _guard_coroutine
        received = _streamed if handler.request_streaming else readable
        wrapped = guard(getattr(handler, kind), handler_call_details.method, received)
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        decode = reading(handler.request_deserializer, message_type(handler_call_details.method))
        result: Handler = make(wrapped, decode, handler.response_serializer)
        return result


def kind_of(handler: Handler) -> str:
    """Such as "unary_stream"."""
    ends = ("stream" if streams else "unary" for streams in (handler.request_streaming, handler.response_streaming))
    return "_".join(ends)


def reading(deserialize: Deserialize | None, kind: Descriptor | None, most: int = MOST_PARTS) -> Deserialize | None:
    """For gRPC: `deserialize`, whose result `readable` must be asked for. kind: of the messages. most: their parts.

    For an unreadable message its error stands, for one that is raised while gRPC decodes would be UNKNOWN to the
    caller; for a large one a call that decodes it, which gRPC would do on the event loop.
    """
    if deserialize is None:
        return None

    def decode(data: bytes, at_once: bool = False) -> object:
        if len(data) > SMALL_BYTES and not at_once:
            return partial(decode, data, True)
        try:
            if at_once and kind is not None:
                check_parts(data, kind, most)
            return deserialize(data)
        except DecodeError:
            return InvalidParameter("request", NO_MESSAGE)
        except (StatusError, InvalidParameter) as error:
            return error

    return decode


async def readable(message: Any) -> Any:
    """What gRPC read by `reading`. Raises InvalidParameter, or StatusError, if it is unreadable."""
    if isinstance(message, partial):
        message = await asyncio.to_thread(message)
    if isinstance(message, Exception):
        raise message
    return message


async def _streamed(requests: AsyncIterator[object]) -> ReadableStream:
    return ReadableStream(requests)


class ReadableStream:
    """A stream of messages that gRPC read by `reading`; raises at the first that is unreadable."""

    def __init__(self, messages: AsyncIterator[Any]) -> None:
        self._messages = messages

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        message = await anext(self._messages)
        return await readable(message) if isinstance(message, (partial, Exception)) else message


def _guard_coroutine(behaviour: Behaviour, method: str, received: Received) -> Behaviour:
    async def guarded(request: Any, context: Context) -> object:
        try:
            result: object = await behaviour(await received(request), context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await _abort(error, method, context)
        return result

    return guarded


def _guard_generator(behaviour: Behaviour, method: str, received: Received) -> Behaviour:
    async def guarded(request: Any, context: Context) -> AsyncIterator[object]:
        try:
            # Closed here, for gRPC drops a cancelled call's generator without closing it.
            async with aclosing(behaviour(await received(request), context)) as responses:
                async for response in responses:
                    yield response
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await _abort(error, method, context)

    return guarded


async def _abort(error: Exception, method: str, context: Context) -> NoReturn:
    await context.abort(*told_of(error, method))


def told_of(error: Exception, method: str) -> tuple[grpc.StatusCode, str, Metadata]:
    """Code, message and trailing metadata that the caller of `method` is told; a mistake of ours is logged."""
    code, message = status_of(error)
    if code is grpc.StatusCode.INTERNAL and not isinstance(error, StatusError):
        logger.error("%s failed", method, exc_info=error)
    message = clipped(message)
    after = error.retry_after if isinstance(error, StatusError) else None
    return code, message, () if after is None else retry_metadata(code, message, after)


def clipped(message: str) -> str:
    """The part of `message` that a status may carry."""
    return message if len(message) <= MOST_MESSAGE else f"{message[: MOST_MESSAGE - 3]}..."
