"""What the processes of specwire share: options, one ready line, two-stage shutdown.

The first SIGINT or SIGTERM drains (or gives up a start that is under way), the second stops at once. A failure is one
line on stderr, never a traceback.

    exit code 0    stopped by a signal
              1    could not start, or could not go on
              2    bad usage
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from specwire.core.sampling import InvalidParameter
from specwire.progress import LAST_LINE
from specwire.rpc.guard import Admission
from specwire.rpc.keys import Keys, read_keys
from specwire.rpc.options import exposure
from specwire.rpc.sizes import size_of
from specwire.rpc.tls import ServerTls, add_server_arguments, server_tls

DRAIN_GRACE = 3.0
MOST_GRACE = 3600.0

# The model's thread gives up the interpreter lock in every operation of a forward and must get it back from the event
# loop's thread; at Python's default of 5 ms a forward of 2 ms was often stretched by half.
SWITCH_INTERVAL_S = 0.0005
STOP_LIMIT = 10.0
# For a start that is given up to clean up.
GIVE_UP_LIMIT = 5.0
MOST_RANKS = 64
DTYPES = ("float32", "bfloat16")
RUNTIMES = ("torch", "openvino", "auto")
QUANTIZATIONS = ("none", "int8")
ANY_PORT = "127.0.0.1:0"
# The logger of what is said, where a log takes it.
SAID = "specwire.say"
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Running(Protocol):
    """A service that was started."""

    @property
    def address(self) -> str:
        """HOST:PORT that it listens on."""
        ...

    async def failed(self) -> str:
        """Return, with the reason, once the service cannot go on; otherwise never."""
        ...

    async def stop(self, grace: float) -> None:
        """Refuse new work, let what runs go on for up to `grace` seconds, then end everything. Idempotent."""
        ...


R = TypeVar("R", bound=Running)


@dataclass(frozen=True, slots=True)
class ModelServiceOptions:
    """How to serve a model, as drafter or verifier.

    Attributes:
        model: a path, a hub id or a scripted model.
        listen: HOST:PORT; port 0 takes a free one.
        runtime: what computes the forwards; auto: openvino where it is installed and agrees with the model, else torch.
        threads: CPU threads of the model's forwards.
        slots: sessions held at once. kv_memory: bytes for their keys and values; the slots are then as many as fit.
        context: positions per slot; None takes the model's own.
        insecure: listen on an address other than loopback without encryption.
        tls: encrypt what is listened on, for figures too.
        metrics: HOST:PORT where figures are read by HTTP (docs/OPERATIONS.md); "" for nowhere.
        keys: who may call; None lets in everybody who can connect.
        ngram: a verifier proposes from the text itself, too; nothing to a drafter.
        quantization: of the linear layers' weights, none or int8.
        compiled: run the model as compiled graphs of static shapes (`specwire.lm.load.load_model`).
        deterministic: a verifier's logits are a function of the text alone, bit for bit; nothing to a drafter.
        tensor_parallel_size: processes over which a verifier splits its model; nothing to a drafter.
    """

    model: str
    listen: str = ANY_PORT
    dtype: str = "float32"
    device: str = "cpu"
    runtime: str = "torch"
    threads: int = 1
    slots: int = 16
    context: int | None = None
    insecure: bool = False
    tls: ServerTls | None = None
    keys: Keys | None = None
    ngram: bool = True
    quantization: str = "none"
    deterministic: bool = False
    kv_memory: int | None = None
    metrics: str = ""
    compiled: bool = False
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        if not self.model:
            raise InvalidParameter("model", "must not be empty")
        check_listen(self.listen)
        check_exposure(self.listen, self.tls, self.insecure)
        check_metrics(self.metrics, self.insecure, self.tls)
        if self.dtype not in DTYPES:
            raise InvalidParameter("dtype", f"must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        if not self.device:
            raise InvalidParameter("device", "must not be empty")
        if self.runtime not in RUNTIMES:
            raise InvalidParameter("runtime", f"must be one of {', '.join(RUNTIMES)}, not {self.runtime!r}")
        if self.quantization not in QUANTIZATIONS:
            raise InvalidParameter(
                "quantization", f"must be one of {', '.join(QUANTIZATIONS)}, not {self.quantization!r}"
            )
        check_deterministic(self.deterministic, self.runtime)
        for field, value in (("threads", self.threads), ("slots", self.slots)):
            if not 1 <= value <= 1024:
                raise InvalidParameter(field, f"must be from 1 to 1024, not {value}")
        check_ranks(self.tensor_parallel_size)
        if self.context is not None and self.context < 2:
            raise InvalidParameter("context", f"must be at least 2, not {self.context}")

    @property
    def admission(self) -> Admission:
        return Admission(self.keys)


def check_listen(listen: str, field: str = "listen") -> None:
    """InvalidParameter of `field` unless `listen` reads HOST:PORT."""
    _, colon, port = listen.rpartition(":")
    if not (colon and port.isascii() and port.isdecimal() and int(port) < 1 << 16):
        raise InvalidParameter(field, f"must be HOST:PORT with a port from 0 to 65535, not {listen!r}")


def check_deterministic(deterministic: bool, runtime: str) -> None:
    """InvalidParameter for a runtime that rounds by what it computes together."""
    if deterministic and runtime == "openvino":
        raise InvalidParameter("deterministic", "needs the runtime torch, not openvino")


def check_ranks(size: int) -> None:
    """InvalidParameter unless a model may be asked to be split over so many processes."""
    if not 1 <= size <= MOST_RANKS:
        raise InvalidParameter("tensor-parallel-size", f"must be from 1 to {MOST_RANKS}, not {size}")


def check_exposure(listen: str, tls: ServerTls | None, insecure: bool) -> None:
    """InvalidParameter if others would read along: said before a model is loaded."""
    exposed = exposure(listen, encrypted=tls is not None, insecure=insecure)
    if exposed is not None:
        raise InvalidParameter("listen", exposed)


def check_metrics(address: str, insecure: bool, tls: ServerTls | None = None) -> str:
    """`address`, of figures, "" for nowhere; InvalidParameter if others would read along."""
    if address:
        check_listen(address, "metrics")
        exposed = exposure(address, encrypted=tls is not None, insecure=insecure)
        if exposed is not None:
            raise InvalidParameter("metrics", exposed)
    return address


def add_model_arguments(parser: argparse.ArgumentParser, threads: int = 1) -> None:
    """The options of ModelServiceOptions, and --json."""
    parser.add_argument("model", metavar="MODEL", help="path, hub id, or scripted:SEED for known logits")
    parser.add_argument("--listen", default=ANY_PORT, metavar="ADDR", help="HOST:PORT, port 0 takes a free one")
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="of weights and arithmetic")
    parser.add_argument("--device", default="cpu", help="such as cpu or cuda:0")
    add_runtime_argument(parser)
    parser.add_argument("--threads", default=threads, type=int, metavar="N", help="CPU threads (default: %(default)s)")
    parser.add_argument("--slots", default=16, type=int, metavar="N", help="sessions at once (default: %(default)s)")
    parser.add_argument(
        "--kv-memory",
        metavar="SIZE",
        help="of keys and values, such as 8G: as many slots as fit, whatever --slots says",
    )
    parser.add_argument("--context", type=int, metavar="N", help="positions per session (default: the model's)")
    add_compile_argument(parser)
    parser.add_argument("--json", action="store_true", help="print the ready line as one JSON object")
    add_listening_arguments(parser, "orchestrators")


def add_compile_argument(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--compile", action="store_true", help="compile the forwards in static shapes: for GPUs, minutes at start"
    )


def add_runtime_argument(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--runtime",
        default="torch",
        choices=RUNTIMES,
        help="of forwards; openvino: on CPUs, with that extra installed; auto: where it can (default: torch)",
    )
    parser.add_argument(
        "--quantization",
        default="none",
        choices=QUANTIZATIONS,
        help="int8: round the weights of linear layers to 8 bits; quick with openvino (default: none)",
    )


def add_deterministic_argument(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="each text a function of itself, bit for bit, whoever shares its forwards; slower (default: off)",
    )


def add_ranks_argument(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--tensor-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="split the target over N processes, on GPUs one for each (default: %(default)s)",
    )


def add_listening_arguments(parser: argparse.ArgumentParser, callers: str) -> None:
    """What every command that listens takes: who may call, encryption, and how it ends. See `drain_grace`."""
    parser.add_argument("--insecure", action="store_true", help="listen beyond loopback without encryption")
    parser.add_argument("--api-keys", metavar="FILE", help=f"{callers} must show a token of FILE: NAME TOKEN lines")
    parser.add_argument(
        "--metrics",
        default="",
        metavar="ADDR",
        help="HOST:PORT for Prometheus, encrypted where the service is (default: nowhere)",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=DRAIN_GRACE,
        metavar="S",
        help="on a signal, let what runs go on for so long (default: %(default)g s)",
    )
    add_server_arguments(parser)


def drain_grace(args: argparse.Namespace) -> float:
    """Seconds of --grace; InvalidParameter if it is no time to wait."""
    if not 0 <= args.grace <= MOST_GRACE:  # nor NaN
        raise InvalidParameter("--grace", f"must be from 0 to {MOST_GRACE:g} seconds, not {args.grace:g}")
    return float(args.grace)


def share_interpreter() -> None:
    """For a process whose event loop and model share one interpreter: hand its lock over quickly."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def model_options(args: argparse.Namespace) -> ModelServiceOptions:
    return ModelServiceOptions(
        model=args.model,
        listen=args.listen,
        dtype=args.dtype,
        device=args.device,
        runtime=args.runtime,
        quantization=args.quantization,
        compiled=args.compile,
        threads=args.threads,
        slots=args.slots,
        kv_memory=size_of("kv-memory", args.kv_memory),
        context=args.context,
        insecure=args.insecure,
        tls=server_tls(args),
        keys=read_keys("--api-keys", args.api_keys),
        metrics=args.metrics,
    )


def run_model_service(args: argparse.Namespace, name: str, start: Callable[[ModelServiceOptions], Awaitable[R]]) -> int:
    """Serve as the command line says until a signal comes; returns the exit code."""
    LAST_LINE.quiet = args.json
    try:
        options, grace = model_options(args), drain_grace(args)
    except InvalidParameter as error:
        say(f"specwire {name}: error: {error}")
        return 2

    def ready(running: R) -> str:
        if args.json:
            return json.dumps({"service": name, "address": running.address, "model": options.model})
        return f"specwire {name}: {options.model} ready on {running.address}"

    return asyncio.run(run_until_signalled(lambda: start(options), ready, name, grace))


async def run_until_signalled(
    start: Callable[[], Awaitable[R]], ready: Callable[[R], str], name: str = "", grace: float = DRAIN_GRACE
) -> int:
    """Start, print the ready line on stdout, serve until a signal or a failure, stop; returns the exit code."""
    prefix = f"specwire {name}".rstrip()
    with _signalled() as signalled:
        try:
            running = await _start_unless(signalled, start)
        except Exception as error:  # whatever keeps a process from starting is one line to its user
            say(f"{prefix}: error: {one_line(error)}")
            return 1
        if running is None:
            return 0
        sys.stdout.write(ready(running) + "\n")
        sys.stdout.flush()
        reason = await _failure_unless(signalled, running)
        if reason is None:
            say(f"{prefix}: draining")
        else:
            say(f"{prefix}: error: {reason}")
        return await _stop(running, grace if reason is None else 0.0, prefix, 0 if reason is None else 1)


async def _start_unless(signalled: asyncio.Event, start: Callable[[], Awaitable[R]]) -> R | None:
    """The started service, or None if a signal came first: the start is then cancelled and has cleaned up."""
    starting = asyncio.ensure_future(start())
    signal_wait = asyncio.ensure_future(signalled.wait())
    try:
        await asyncio.wait({starting, signal_wait}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            return starting.result()
        starting.cancel()
        done, _ = await asyncio.wait({starting}, timeout=GIVE_UP_LIMIT)
        if not done:
            raise TimeoutError(f"the start that was given up did not end within {GIVE_UP_LIMIT:g} s")
        if starting.cancelled() or starting.exception() is not None:
            return None
        async with asyncio.timeout(STOP_LIMIT):
            await starting.result().stop(0.0)
        return None
    finally:
        signal_wait.cancel()


async def _failure_unless(signalled: asyncio.Event, running: R) -> str | None:
    failure = asyncio.ensure_future(running.failed())
    signal_wait = asyncio.ensure_future(signalled.wait())
    try:
        await asyncio.wait({failure, signal_wait}, return_when=asyncio.FIRST_COMPLETED)
        return None if signalled.is_set() else failure.result()
    finally:
        failure.cancel()
        signal_wait.cancel()


async def _stop(running: R, grace: float, prefix: str, code: int) -> int:
    try:
        async with asyncio.timeout(grace + STOP_LIMIT):
            await running.stop(grace)
    except Exception as error:
        say(f"{prefix}: error while stopping: {one_line(error)}")
        return 1
    return code


@contextmanager
def _signalled() -> Iterator[asyncio.Event]:
    """An event set by the first signal; the second one ends the process on the spot."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if event.is_set():
            os._exit(128 + number)
        event.set()

    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield event
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


def one_line(error: BaseException) -> str:
    """An error for a user: its message without line breaks; its type too where the message alone says too little."""
    message = " ".join(str(error).split())
    terse = type(error).__module__ == "builtins" and not isinstance(error, (ValueError, OSError, RuntimeError))
    return f"{type(error).__name__}: {message}".rstrip(": ") if terse or not message else message


def say(line: str) -> None:
    """Progress and errors, for people; a log line where lines are for machines (`specwire.telemetry.logs`)."""
    said = logging.getLogger(SAID)
    if said.handlers:
        said.log(logging.ERROR if ": error: " in line else logging.INFO, "%s", line)
        return
    LAST_LINE.say(line)
