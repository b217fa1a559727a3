"""A verifier as a service: load, measure, listen, stop. Used by the command line and by actors alike."""

from __future__ import annotations

import argparse
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from specwire.core.sampling import InvalidParameter
from specwire.rpc.model_info import model_info_to_wire
from specwire.rpc.process import (
    ModelServiceOptions,
    add_deterministic_argument,
    add_model_arguments,
    check_deterministic,
    run_model_service,
    say,
    share_interpreter,
)
from specwire.rpc.server import RunningServer, Service, serve
from specwire.v1 import common_pb2, verify_pb2, verify_pb2_grpc
from verify_service.service import EngineWorker, VerifyServicer
from verify_service.worker import Deliver, GoOn, Load, Runnable, Worker

# For calls that are not links, such as a health watch.
LAST_CALLS_S = 0.2
DETACH_GRACE_S = 30.0
MOST_DETACH_GRACE_S = 3600.0
SERVICE = verify_pb2.DESCRIPTOR.services_by_name["VerifyService"].full_name


class RunningVerifier:
    """A verifier that answers at `address`."""

    def __init__(
        self,
        worker: EngineWorker,
        servicer: VerifyServicer,
        server: RunningServer,
        info: common_pb2.GetModelInfoResponse,
    ) -> None:
        self._worker = worker
        self._servicer = servicer
        self._server = server
        self.info = info

    @property
    def address(self) -> str:
        return self._server.address

    async def failed(self) -> str:
        """Return, with the reason, once the verifier cannot go on."""
        return await self._worker.failed()

    async def stop(self, grace: float = 0.0) -> None:
        """Refuse new links, let the present ones go on for up to `grace` seconds, then end. Idempotent."""
        await self._server.set_serving(False)
        await self._servicer.drain(grace)
        await self._server.stop(LAST_CALLS_S)
        await self._worker.stop()


async def start(
    options: ModelServiceOptions, patient: bool = False, detach_grace: float = DETACH_GRACE_S
) -> RunningVerifier:
    """Load and measure the model, then listen; health says SERVING from the first answer on.

    Args:
        patient: wait for all draft tokens that are due, as textbook speculation does; for measurements only.
        detach_grace: seconds for which a session is kept that lost its link; 0 drops it at once.

    Raises:
        InvalidParameter: as `check_grace`.
        ModelError: the model cannot be served.
        ListenError: the address cannot be listened on.
    """
    check_grace(detach_grace)
    share_interpreter()
    worker = Worker(_loader(options, patient, detach_grace))
    info = await worker.start()
    servicer = VerifyServicer(worker, info)
    service = Service(
        SERVICE,
        lambda server: verify_pb2_grpc.add_VerifyServiceServicer_to_server(servicer, server),
        options.admission,
    )
    try:
        server = await serve([service], options.listen, tls=options.tls, allow_insecure=options.insecure)
    except BaseException:
        await worker.stop()
        raise
    return RunningVerifier(worker, servicer, server, info)


def check_grace(seconds: float) -> None:
    """InvalidParameter unless it is a time for which a verifier may keep what nobody asks for."""
    if not 0 <= seconds <= MOST_DETACH_GRACE_S:  # nor NaN
        raise InvalidParameter("detach_grace", f"must be from 0 to {MOST_DETACH_GRACE_S:g} seconds, not {seconds:g}")


def _loader(options: ModelServiceOptions, patient: bool, detach_grace: float) -> Load[common_pb2.GetModelInfoResponse]:
    def load(deliver: Deliver, go_on: GoOn) -> tuple[Runnable, common_pb2.GetModelInfoResponse]:
        # torch comes with these; a process that only parses its arguments does without.
        from specwire.core.costs import StepCosts
        from specwire.lm import load_model
        from verify_service.calibrate import calibrate
        from verify_service.engine import Engine

        say(f"specwire verify: loading {options.model}")
        lm = load_model(
            options.model,
            slots=options.slots,
            dtype=options.dtype,
            device=options.device,
            runtime=options.runtime,
            quantization=options.quantization,
            deterministic=options.deterministic,
            context=options.context,
            threads=options.threads,
        )
        go_on()
        say("specwire verify: measuring forward times")
        times = calibrate(lm, go_on=go_on)
        info = model_info_to_wire(lm.info, lm.slots)
        for rows, microseconds in times.points.items():
            info.forward_times.add(rows=rows, microseconds=round(microseconds))
        grace_us = detach_grace * 1e6
        engine = Engine(lm, StepCosts(times), deliver, patient=patient, ngram=options.ngram, detach_grace_us=grace_us)
        return engine, info

    return load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_deterministic_argument(parser)
    parser.add_argument(
        "--patient", action="store_true", help="wait for all due draft tokens: a baseline to measure, never faster"
    )
    parser.add_argument(
        "--ngram",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="propose what followed the same tokens earlier in the text, where that pays (default: on)",
    )
    parser.add_argument(
        "--detach-grace",
        type=float,
        default=DETACH_GRACE_S,
        metavar="S",
        help="keep a session for so long after its link was lost (default: %(default)g s)",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; returns the exit code."""
    try:
        check_grace(args.detach_grace)
        check_deterministic(args.deterministic, args.runtime)
    except InvalidParameter as error:
        say(f"specwire verify: error: {error}")
        return 2

    def serve_with(options: ModelServiceOptions) -> Coroutine[Any, Any, RunningVerifier]:
        options = replace(options, ngram=args.ngram, deterministic=args.deterministic)
        return start(options, args.patient, args.detach_grace)

    return run_model_service(args, "verify", serve_with)
