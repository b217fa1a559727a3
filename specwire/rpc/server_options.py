"""Options of a serving process: where it listens, to whom, and how it runs a model."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from specwire.core.invalid import InvalidParameter
from specwire.core.model import (
    AUTO,
    AUTO_KV,
    ENGINES,
    KV_TYPES,
    QUANTIZATIONS,
    RANKS,
    RUNTIMES,
    SPECWIRE,
    STAGES,
    Loading,
)
from specwire.progress import LAST_LINE
from specwire.rpc.channel import exposure
from specwire.rpc.keys import Keys, read_keys
from specwire.rpc.process import R, run_until_signalled
from specwire.rpc.renewal import Origin
from specwire.rpc.tls import ServerTls, server_tls

Options = TypeVar("Options")


def filled(kind: type[Options], source: object, without: tuple[str, ...] = (), **given: Any) -> Options:
    """Options of another kind, or of a command line, as `kind` has them: what is `given`, and else what has the same
    name in `source`, but for `without` and what is None there, which keep their defaults.
    """
    known = {each.name for each in fields(kind)} - {*without}  # type: ignore[arg-type]  # all options are dataclasses
    found = {name: getattr(source, name, None) for name in known - given.keys()}
    said = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
    return kind(**given, **{name: value for name, value in said.items() if value is not None})


# ----------------------------------------------------------------------------------------------------------------------
# Options of every process that listens: where, who may call, and how it ends.

MOST_GRACE = 3600.0
ANY_PORT = "127.0.0.1:0"


def check_listen(listen: str, field: str = "listen") -> None:
    """InvalidParameter of `field` unless `listen` reads HOST:PORT."""
    _, colon, port = listen.rpartition(":")
    if not (colon and port.isascii() and port.isdecimal() and int(port) < 1 << 16):
        raise InvalidParameter(field, f"must be HOST:PORT with a port from 0 to 65535, not {listen!r}")


def check_exposure(address: str, tls: ServerTls | None, insecure: bool, field: str = "listen") -> None:
    """InvalidParameter unless it reads HOST:PORT, where others cannot read along; checked before a model is loaded."""
    check_listen(address, field)
    exposed = exposure(address, encrypted=tls is not None, insecure=insecure)
    if exposed is not None:
        raise InvalidParameter(field, exposed)


def check_metrics(address: str, insecure: bool, tls: ServerTls | None = None) -> str:
    """`address`, of figures, "" for nowhere; InvalidParameter as above."""
    if address:
        check_exposure(address, tls, insecure, "metrics")
    return address


def drain_grace(args: argparse.Namespace) -> float:
    """Seconds of --grace; InvalidParameter if it is no time to wait."""
    if not 0 <= args.grace <= MOST_GRACE:  # nor NaN
        raise InvalidParameter("--grace", f"must be from 0 to {MOST_GRACE:g} seconds, not {args.grace:g}")
    return float(args.grace)


# ----------------------------------------------------------------------------------------------------------------------
# Sizes of memory on the command line: a number with K, M, G or T, powers of 1024.

SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)([KMGT]?)", re.IGNORECASE)
POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def size_of(field: str, text: str | None) -> int | None:
    """Bytes; None without a text. Raises InvalidParameter of `field`."""
    if text is None:
        return None
    found = SIZE.fullmatch(text)
    size = int(float(found[1]) * 1024 ** POWERS[found[2].upper()]) if found else 0
    if size < 1:
        raise InvalidParameter(field, f"must be a size such as 512M or 1.5G, not {text!r}")
    return size


# ----------------------------------------------------------------------------------------------------------------------
# How a model is served, as drafter or verifier: its options, on the command line and checked.

MOST_RANKS, MOST_LAYERS = 64, 1024
MOST_THREADS = 1024
DTYPES = ("float32", "bfloat16")
# What a service may be told; AUTO: what the device computes itself (`specwire.lm.native_dtype`).
SERVED_DTYPES = (AUTO, *DTYPES)
# A million tokens of texts.
TEXT_MEMORY = 64 << 20


@dataclass(frozen=True, slots=True)
class ModelServiceOptions:
    """How to serve a model, as drafter or verifier: options of `specwire verify` and `draft` (`specwire.options`).

    Attributes:
        context: None for the model's own.
        insecure: listen on an address other than loopback without encryption. tls: of figures, too.
        keys: who may call; None lets in everybody who can connect.
        text_memory: bytes. kv_memory: bytes, for as many slots as fit; None goes by `slots`.
        ngram, text_memory, references, heads, deterministic, engine: nothing to a drafter.
        engine_options: of vLLM's EngineArgs, a JSON object. compiled: `specwire.lm.load.load_model`.
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
    text_memory: int = TEXT_MEMORY
    references: tuple[str, ...] = ()
    quantization: str = "none"
    deterministic: bool = False
    heads: str = ""
    kv_memory: int | None = None
    metrics: str = ""
    compiled: bool = False
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    engine: str = SPECWIRE
    engine_options: str = "{}"
    kv_type: str = AUTO_KV
    gpu_layers: int = 0

    def __post_init__(self) -> None:
        if not self.model:
            raise InvalidParameter("model", "must not be empty")
        check_exposure(self.listen, self.tls, self.insecure)
        check_metrics(self.metrics, self.insecure, self.tls)
        if not self.device:
            raise InvalidParameter("device", "must not be empty")
        for field, word, known in (
            ("dtype", self.dtype, SERVED_DTYPES),
            ("runtime", self.runtime, RUNTIMES),
            ("quantization", self.quantization, QUANTIZATIONS),
            ("engine", self.engine, ENGINES),
            ("kv-type", self.kv_type, KV_TYPES),
        ):
            if word not in known:
                raise InvalidParameter(field, f"must be one of {', '.join(known)}, not {word!r}")
        for field, value, least, most in (
            ("threads", self.threads, 1, MOST_THREADS),
            ("slots", self.slots, 1, MOST_THREADS),
            ("gpu-layers", self.gpu_layers, 0, MOST_LAYERS),
        ):
            if not least <= value <= most:
                raise InvalidParameter(field, f"must be from {least} to {most}, not {value}")
        _check_ranks(self.tensor_parallel_size, self.pipeline_parallel_size, self.engine)
        engine_options(self.engine, self.engine_options)
        if self.context is not None and self.context < 2:
            raise InvalidParameter("context", f"must be at least 2, not {self.context}")

    def loading(self) -> dict[str, Any]:
        """How `specwire.lm.load_model` loads the model, on every rank alike."""
        given = {
            "heads": self.heads or None,
            "engine_options": engine_options(self.engine, self.engine_options),
            "stages": self.pipeline_parallel_size,
        }
        return asdict(filled(Loading, self, without=("ranks",), **given))

    @property
    def ranks(self) -> int:
        """Processes that compute the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def listened(self) -> list[tuple[str, str]]:
        """Where it listens, by option."""
        return [("listen", self.listen), *([("metrics", self.metrics)] if self.metrics else [])]

    @property
    def origins(self) -> tuple[Origin[Any] | None, ...]:
        """Of keys and certificates that may change while it runs; None for those that were not read of files."""
        return tuple(None if each is None else each.origin for each in (self.tls, self.keys))


def engine_options(engine: str, text: str) -> dict[str, Any]:
    """What `--engine-options` says; InvalidParameter unless it is a JSON object, empty for our own engine."""
    try:
        options = json.loads(text)
    except ValueError as error:
        raise InvalidParameter("engine-options", f"must be a JSON object, not {text!r:.80} ({error})") from error
    if not isinstance(options, dict):
        raise InvalidParameter("engine-options", f"must be a JSON object, not {text!r:.80}")
    if options and engine == SPECWIRE:
        raise InvalidParameter("engine-options", f"are vLLM's, and go with --engine vllm only: {text!r:.80}")
    return options


def _check_ranks(size: int, stages: int = 1, engine: str = SPECWIRE) -> None:
    """InvalidParameter unless vLLM may split a model into stages of this many processes each."""
    if not 1 <= size <= MOST_RANKS:
        raise InvalidParameter(RANKS, f"must be from 1 to {MOST_RANKS}, not {size}")
    if not 1 <= stages <= MOST_RANKS // size:
        raise InvalidParameter(STAGES, f"must be from 1 to {MOST_RANKS // size} beside {RANKS} {size}, not {stages}")
    for name, value in ((RANKS, size), (STAGES, stages)):
        if value > 1 and engine == SPECWIRE:
            raise InvalidParameter(name, f"is vLLM's, and goes with --engine vllm only, not {value}")


def model_options(args: argparse.Namespace) -> ModelServiceOptions:
    """Raises InvalidParameter."""
    more: dict[str, Any] = {}
    if hasattr(args, "text_memory"):  # a verifier's
        more = {"text_memory": text_memory_of(args.text_memory), "references": tuple(args.reference)}
    return filled(
        ModelServiceOptions,
        args,
        kv_memory=size_of("kv-memory", args.kv_memory),
        tls=server_tls(args),
        keys=read_keys("--api-keys", args.api_keys),
        **more,
    )


def text_memory_of(text: str) -> int:
    """Bytes that --text-memory says; raises InvalidParameter."""
    return 0 if text == "0" else size_of("text-memory", text) or 0


def run_model_service(
    args: argparse.Namespace, name: str, options: ModelServiceOptions, grace: float, start: Callable[[], Awaitable[R]]
) -> int:
    """Serve as the command line says until a signal comes; returns the exit code."""
    LAST_LINE.quiet = args.json

    def ready(running: R) -> str:
        if args.json:
            return json.dumps({"service": name, "address": running.address, "model": options.model})
        return f"specwire {name}: {options.model} ready on {running.address}"

    return asyncio.run(run_until_signalled(start, ready, name, grace))
