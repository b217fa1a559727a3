"""A drafter as a service: load, listen, stop. Used by the command line and by actors alike."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from draft_service.drafter import Book, Drafter
from draft_service.service import DraftServicer, ModelDrafter
from specwire.rpc.model_info import model_info_to_wire
from specwire.rpc.process import ModelServiceOptions, add_model_arguments, run_model_service, say, share_interpreter
from specwire.rpc.server import RunningServer, Service, serve
from specwire.v1 import common_pb2, draft_pb2, draft_pb2_grpc

SERVICE = draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name


class RunningDrafter:
    """A drafter that answers at `address`."""

    def __init__(
        self,
        drafter: ModelDrafter,
        servicer: DraftServicer,
        server: RunningServer,
        info: common_pb2.GetModelInfoResponse,
    ) -> None:
        self._drafter = drafter
        self._servicer = servicer
        self._server = server
        self.info = info

    @property
    def address(self) -> str:
        return self._server.address

    async def failed(self) -> str:
        return await self._drafter.failed()

    async def stop(self, grace: float = 0.0) -> None:
        """Idempotent. Links end at once; other calls have `grace` seconds."""
        self._servicer.leave()
        await self._server.stop(grace)
        await self._drafter.stop()


async def start(options: ModelServiceOptions) -> RunningDrafter:
    """Load the model, then listen.

    Raises:
        ModelError: the model cannot be served.
        ListenError: the address cannot be listened on.
    """
    share_interpreter()
    drafter = Drafter(_loader(options))
    info = await drafter.start()
    servicer = DraftServicer(drafter, info)
    service = Service(SERVICE, lambda server: draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server))
    try:
        server = await serve([service], options.listen, tls=options.tls, allow_insecure=options.insecure)
    except BaseException:
        await drafter.stop()
        raise
    return RunningDrafter(drafter, servicer, server, info)


def _loader(options: ModelServiceOptions) -> Callable[[], tuple[Book, common_pb2.GetModelInfoResponse]]:
    def load() -> tuple[Book, common_pb2.GetModelInfoResponse]:
        # torch comes with these; a process that only parses its arguments does without.
        from draft_service.sessions import Sessions
        from specwire.lm import load_model

        say(f"specwire draft: loading {options.model}")
        model = load_model(
            options.model,
            slots=options.slots,
            dtype=options.dtype,
            device=options.device,
            context=options.context,
            threads=options.threads,
        )
        return Sessions(model), model_info_to_wire(model.info, model.slots)

    return load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> int:
    return run_model_service(args, "draft", start)
