"""A gRPC server as every process of specwire runs it: health, reflection, error policy, graceful stop."""

from __future__ import annotations

import asyncio
import errno
import inspect
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from specwire.rpc.channel import MOST_MESSAGE_BYTES, exposure, host_of, server_options
from specwire.rpc.errors import Behaviour, Context, Continuation, ErrorPolicy, Handler, StatusError, kind_of
from specwire.rpc.keys import Keys, Metadata
from specwire.rpc.tls import Certification, ServerTls

# ----------------------------------------------------------------------------------------------------------------------
# Access to a server: who may call which service, and how large a message may be.


class MessageTooLong(StatusError):
    """A caller's message exceeds what its service takes."""

    def __init__(self, size: int, most: int) -> None:
        super().__init__(grpc.StatusCode.RESOURCE_EXHAUSTED, f"request: {size} bytes, at most {most} are taken")


@dataclass(frozen=True, slots=True)
class Service:
    """A service to host.

    name: full name, such as specwire.v1.VerifyService.
    register: adds the servicer to a server, such as
        `lambda server: verify_pb2_grpc.add_VerifyServiceServicer_to_server(servicer, server)`.
    keys: who may call; None: everybody. most_bytes: of one message, below the cap of every message.
    """

    name: str
    register: Callable[[grpc.aio.Server], None]
    keys: Keys | None = None
    most_bytes: int = MOST_MESSAGE_BYTES


@dataclass(eq=False, slots=True)
class _RunningCall:
    """A call that was let in by `metadata`, and is ended with `revoked` once that is no longer valid."""

    keys: Keys | None
    metadata: Metadata
    context: Context
    task: asyncio.Task[Any] | None
    revoked: StatusError | None = None


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic at run time
    """Called within ErrorPolicy, which turns its errors into statuses.

    Args:
        services: those that have a say. Others, which are health checks and reflection, are open to everybody.
        tls: of the server.

    Invariant: while keys or authorities may change, every call that runs is in `_running`.
    """

    def __init__(self, services: Iterable[Service], tls: ServerTls | None = None) -> None:
        self._services = {service.name: service for service in services}
        self._certification = Certification(tls)
        self._certified = tls is not None and tls.origin is not None and tls.client_ca is not None
        self._running: set[_RunningCall] = set()

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        handler = await continuation(handler_call_details)
        service = self._services.get(handler_call_details.method.rpartition("/")[0].lstrip("/"))
        if service is None or handler is None:  # an unknown method has no handler
            return handler
        keys, metadata = service.keys, handler_call_details.invocation_metadata
        if keys is not None:
            try:
                keys.holder(metadata)
            except StatusError as error:
                return _refusing(handler, error)
        if self._certified or (keys is not None and keys.origin is not None):
            handler = self._watched(handler, keys, metadata)
        # gRPC itself refuses what exceeds the cap of every message.
        return handler if service.most_bytes >= MOST_MESSAGE_BYTES else _bounded(handler, service.most_bytes)

    def recheck(self) -> None:
        """End running calls whose token or certificate is no longer valid, with UNAUTHENTICATED."""
        for call in self._running:
            if call.revoked is None and call.task is not None:
                call.revoked = self._revoked(call)
                if call.revoked is not None:
                    call.task.cancel()

    def _revoked(self, call: _RunningCall) -> StatusError | None:
        """Why the call may not go on: what its caller showed is no longer valid."""
        if not self._certification.holds(lambda: certificates_of(call.context)):
            message = "the certificate that was shown is of no authority that is still trusted here"
            return StatusError(grpc.StatusCode.UNAUTHENTICATED, message)
        try:
            if call.keys is not None:
                call.keys.holder(call.metadata)
        except StatusError as error:
            return error
        return None

    def _watched(self, handler: Handler, keys: Keys | None, metadata: Metadata) -> Handler:
        behaviour: Behaviour = getattr(handler, kind_of(handler))

        async def call(request: Any, context: Context) -> Any:
            with self._let_in(_RunningCall(keys, metadata, context, asyncio.current_task())):
                return await behaviour(request, context)

        async def stream(request: Any, context: Context) -> None:
            """It writes by itself, so that it can be ended while the caller does not read."""
            with self._let_in(_RunningCall(keys, metadata, context, asyncio.current_task())):
                async with aclosing(behaviour(request, context)) as responses:
                    async for response in responses:
                        await context.write(response)

        watched = stream if inspect.isasyncgenfunction(behaviour) else call
        return _rebuilt(handler, watched, handler.request_deserializer)

    @contextmanager
    def _let_in(self, call: _RunningCall) -> Iterator[None]:
        """Raises StatusError: UNAUTHENTICATED, at once or later."""
        refusal = self._revoked(call)
        if refusal is not None:
            raise refusal
        self._running.add(call)
        try:
            yield
        except asyncio.CancelledError:
            if call.revoked is None or call.task is None or call.task.uncancel():
                raise  # the caller has left
            raise call.revoked from None
        finally:
            self._running.discard(call)


def certificates_of(context: Context) -> tuple[bytes, bytes]:
    """The certificate that a caller shows, and the others that came with it, in PEM; b"" where there is none."""
    shown = context.auth_context()
    first, more = (b"".join(shown.get(name, ())) for name in ("x509_pem_cert", "x509_pem_cert_chain"))
    return first, more


COMMON_NAME = "x509_common_name"


def certified_names(context: Context) -> set[str]:
    """What the caller's certificate calls it: alternative names and the common name."""
    shown = context.auth_context()
    fields = ("x509_subject_alternative_name", COMMON_NAME)
    return {name.decode(errors="replace") for field in fields for name in shown.get(field, ())}


def common_name(context: Context) -> str:
    """Of the caller's certificate; "" without one."""
    return next((name.decode(errors="replace") for name in context.auth_context().get(COMMON_NAME, ())), "")


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


class ListenError(Exception):
    """The server cannot listen at the given address; the message names it."""


class RunningServer:
    """A server that listens. `address` is HOST:PORT as a client on this machine dials it.

    Args: checks: grpc_health's asyncio servicer, for which there are no types.
    """

    def __init__(self, server: grpc.aio.Server, checks: Any, names: Sequence[str], address: str, guard: Guard) -> None:
        self._server = server
        self._guard = guard
        self._checks = checks
        self._names = names
        self.address = address
        self.port = int(address.rpartition(":")[2])

    async def set_serving(self, serving: bool) -> None:
        """Tell health checks, overall and for each service, whether calls are wanted."""
        states = health_pb2.HealthCheckResponse
        for name in ("", *self._names):
            await self._checks.set(name, states.SERVING if serving else states.NOT_SERVING)

    def recheck(self) -> None:
        """End calls whose token or certificate is no longer valid; for `specwire.rpc.renewal`."""
        self._guard.recheck()

    async def stop(self, grace: float = 5.0) -> None:
        """Health checks fail at once, new calls are refused, running ones get `grace` seconds, then are cancelled."""
        await self._checks.enter_graceful_shutdown()
        await self._server.stop(grace)


async def serve(
    services: Sequence[Service], listen: str, *, tls: ServerTls | None = None, allow_insecure: bool = False
) -> RunningServer:
    """Start a server.

    Args:
        listen: HOST:PORT; port 0 takes a free one, an empty host is the loopback address.
        tls: encrypt; None speaks plaintext.
        allow_insecure: listen beyond this machine without TLS.

    Raises:
        ListenError: bad address, port in use, or an address beyond this machine with neither tls nor allow_insecure.
    """
    host, port = parse_listen(listen)
    exposed = exposure(listen, encrypted=tls is not None, insecure=allow_insecure)
    if exposed is not None:
        raise ListenError(f"listen: {exposed}")
    check_free([("listen", listen)])  # gRPC would write its own complaint to standard error
    guard = Guard(services, tls)
    server = grpc.aio.server(interceptors=[ErrorPolicy(), guard], options=server_options())
    checks: Any = health.aio.HealthServicer()  # type: ignore[attr-defined]  # the stubs do not know health.aio
    names = [service.name for service in services]
    for service in services:
        service.register(server)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    running = RunningServer(server, checks, names, _bind(server, host, port, listen, tls), guard)
    await running.set_serving(True)
    await server.start()
    return running


def parse_listen(listen: str) -> tuple[str, int]:
    """(host, port) of HOST:PORT. `localhost` becomes 127.0.0.1: one address, whatever the resolver's order."""
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ListenError(f"listen: {listen!r} is not HOST:PORT")
    host = host_of(listen)
    return ("127.0.0.1" if host in ("", "localhost") else host), int(port)


def check_free(wanted: Iterable[tuple[str, str]]) -> None:
    """Raises ListenError unless all of them, (field, HOST:PORT), can be listened on now, side by side.

    Asked before a model is loaded, so that a taken port is told at once.
    """
    with ExitStack() as held:
        for field, listen in wanted:
            try:
                held.enter_context(bound(listen))
            except OSError as error:
                reason = "the port is in use" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
                raise ListenError(f"{field}: cannot listen on {listen}: {reason}") from error


def bound(listen: str) -> socket.socket:
    """A socket that listens there. Raises OSError; ListenError for what is no HOST:PORT."""
    host, port = parse_listen(listen)
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    probe = socket.socket(family, kind, protocol)
    try:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
        probe.listen(1)
    except OSError:
        probe.close()
        raise
    return probe


def _bind(server: grpc.aio.Server, host: str, port: int, listen: str, tls: ServerTls | None) -> str:
    wanted = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        bound = server.add_secure_port(wanted, tls.credentials()) if tls else server.add_insecure_port(wanted)
    except RuntimeError as error:
        raise ListenError(f"listen: cannot listen on {listen}: {error}") from error
    return dialled(host, bound)


def dialled(host: str, port: int) -> str:
    """HOST:PORT as a client on this machine dials what listens there."""
    near = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{near}]:{port}" if ":" in near else f"{near}:{port}"
