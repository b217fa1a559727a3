"""What an HTTP caller is told when something fails: {"error": {message, type, param, code}} and a status.

Statuses of gRPC become those that google.rpc.Code names for HTTP.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import grpc
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from orchestrator.chat.models import CannotChat
from orchestrator.session.appender import retry_of_store, status_of_store
from orchestrator.store import StoreError
from specwire.core.invalid import ContextExceeded, InvalidParameter
from specwire.core.law.constraint import ConstraintKind
from specwire.rpc.errors import NEUTRAL_MESSAGE, StatusError, clipped
from specwire.text.sandbox import Busy

logger = logging.getLogger(__name__)

# The x-request-id of the request that is being answered.
request_name: ContextVar[str] = ContextVar("request_name", default="")

INVALID = "invalid_request_error"
SERVER = "server_error"

# Status, type and code. Codes are those of OpenAI's API where it has one.
OF_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: (400, INVALID, "invalid_value"),
    grpc.StatusCode.FAILED_PRECONDITION: (400, INVALID, "failed_precondition"),
    grpc.StatusCode.UNAUTHENTICATED: (401, "authentication_error", "invalid_api_key"),
    grpc.StatusCode.NOT_FOUND: (404, INVALID, "not_found"),
    grpc.StatusCode.ALREADY_EXISTS: (409, INVALID, "already_exists"),
    grpc.StatusCode.ABORTED: (409, SERVER, "aborted"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (429, "rate_limit_error", "rate_limit_exceeded"),
    grpc.StatusCode.OUT_OF_RANGE: (400, INVALID, "out_of_range"),
    grpc.StatusCode.CANCELLED: (499, INVALID, "cancelled"),
    grpc.StatusCode.DATA_LOSS: (500, SERVER, "data_loss"),
    grpc.StatusCode.UNAVAILABLE: (503, SERVER, "unavailable"),
    grpc.StatusCode.DEADLINE_EXCEEDED: (504, SERVER, "deadline_exceeded"),
}
INTERNAL = (500, SERVER, "internal_error")

# Seconds after which to come again where nothing else says so.
RETRY_S = 1.0

# Fields of the wire that have another name here.
NAMES = {"stop_ids": "stop_token_ids", ConstraintKind.JSON_SCHEMA: "response_format"}


@dataclass(eq=False)
class Failure(Exception):
    """An answer that is an error. param: the field that is wrong. retry_after: seconds. close: the connection, too."""

    status: int
    message: str
    kind: str = INVALID
    param: str | None = None
    code: str | None = None
    retry_after: float | None = None
    close: bool = False

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, object]:
        error = {"message": clipped(self.message), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        headers = {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after)))  # whole seconds, by RFC 9110
        if self.close:
            headers["Connection"] = "close"
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body(), self.status, headers)


def failure_of(error: Exception) -> Failure:
    """The answer to a caller for `error`. A failure of ours is logged, and told in a neutral sentence."""
    match error:
        case Failure():
            return error
        case InvalidParameter():
            return _invalid(error)
        case StatusError():
            status, kind, code = OF_STATUS.get(error.code, INTERNAL)
            return Failure(status, error.message, kind, _constraint_of(error), code, error.retry_after)
        case StoreError():
            status, kind, code = OF_STATUS.get(status_of_store(error), INTERNAL)
            return Failure(status, str(error), kind, None, code, retry_of_store(error))
        case Busy():
            return Failure(503, str(error), SERVER, None, "unavailable", RETRY_S)
        case HTTPException():
            code = "method_not_allowed" if error.status_code == 405 else "not_found"
            return Failure(error.status_code, str(error.detail), INVALID, None, code)
        case _:
            logger.error("HTTP request %s failed", request_name.get(), exc_info=error)
            status, kind, code = INTERNAL
            return Failure(status, NEUTRAL_MESSAGE, kind, None, code)


@contextmanager
def naming(names: Mapping[str, str]) -> Iterator[None]:
    """What fails by a session's own fields is told by those that they were made of."""
    try:
        yield
    except (InvalidParameter, StatusError) as error:
        failure = failure_of(error)
        name, dot, rest = (failure.param or "").partition(".")
        failure.param = (names.get(name, name) + dot + rest) or None
        raise failure from None


def _constraint_of(error: StatusError) -> str | None:
    """The field, where a verifier has refused what form the answer must have."""
    field = error.message.partition(":")[0]
    return NAMES.get(field, field) if field in set(ConstraintKind) else None


def _invalid(error: InvalidParameter) -> Failure:
    status, kind, code = OF_STATUS[grpc.StatusCode.INVALID_ARGUMENT]
    field = error.field
    if isinstance(error, ContextExceeded):
        code = "context_length_exceeded"
    elif isinstance(error, CannotChat):
        code = error.code
    return Failure(status, str(error), kind, NAMES.get(field, field), code)
