"""The command line of an orchestrator: `specwire orchestrate` and `python -m orchestrator`."""

from __future__ import annotations

import argparse
import asyncio
import json

from orchestrator import server
from orchestrator.options import OrchestratorOptions, and_http, chat_template_of, http_access_of, http_of
from orchestrator.sessions import ORCHESTRATOR
from orchestrator.tenants import access_of
from specwire.options import add_options
from specwire.registry.options import cloud_of, registry_of
from specwire.rpc.keys import read_peer_token
from specwire.rpc.process import run_until_signalled, say
from specwire.rpc.server_options import check_listen, drain_grace, filled
from specwire.rpc.tls import client_tls, server_tls
from specwire.telemetry.options import telemetry_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "orchestrate")


def options_of(args: argparse.Namespace) -> OrchestratorOptions:
    """Raises ValueError that names the option."""
    for field, addresses in (("listen", [args.listen]), ("verifier", args.verifier), ("drafter", args.drafter)):
        for address in addresses:
            check_listen(address, field)
    return serving_options(args, tuple(args.drafter))


def serving_options(args: argparse.Namespace, drafters: tuple[str, ...] = ()) -> OrchestratorOptions:
    """The options of every command that runs an orchestrator. Raises ValueError that names the option."""
    return filled(
        OrchestratorOptions,
        args,
        verifiers=tuple(args.verifier),
        drafters=drafters,
        tls=server_tls(args),
        peer_tls=client_tls(args),
        peer_token=read_peer_token(args),
        access=access_of(args, args.drafter_keys),
        drafter_names=tuple(args.drafter_name),
        http=http_of(args),
        chat_template=chat_template_of(args),
        http_access=http_access_of(args),
        registration=registry_of(args),
        cloud=cloud_of(args),
    )


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; returns the exit code."""
    try:
        options, grace, telemetry = options_of(args), drain_grace(args), telemetry_of(args)
    except ValueError as error:
        say(f"specwire orchestrate: error: {error}")
        return 2
    telemetry.start(ORCHESTRATOR)

    def ready(running: server.RunningOrchestrator) -> str:
        if args.json:
            return json.dumps({"service": "orchestrate", "address": running.address, "http": running.http})
        return f"specwire orchestrate: ready on {running.address}{and_http(running.http)}"

    return asyncio.run(run_until_signalled(lambda: server.start(options), ready, "orchestrate", grace))
