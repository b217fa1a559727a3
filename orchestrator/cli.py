"""The command line of an orchestrator: `specwire orchestrate` and `python -m orchestrator`."""

from __future__ import annotations

import argparse
import asyncio
import json

from orchestrator import server
from orchestrator.options import (
    NO_HTTP,
    VERIFIER_WAIT_S,
    OrchestratorOptions,
    add_drafters_per_session,
    add_http_arguments,
    add_log_arguments,
    and_http,
    chat_template_of,
    http_access_of,
    http_of,
)
from orchestrator.sessions import ORCHESTRATOR
from orchestrator.tenants import access_of, add_tenant_arguments
from specwire.registry.options import add_cloud_arguments, add_registry_arguments, cloud_of, registry_of
from specwire.rpc.keys import read_peer_token
from specwire.rpc.process import run_until_signalled, say
from specwire.rpc.server_options import add_listening_arguments, check_listen, drain_grace
from specwire.rpc.tls import add_client_arguments, client_tls, server_tls
from specwire.telemetry.options import add_prompts_argument, add_telemetry_arguments, telemetry_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--verifier", action="append", default=[], metavar="ADDR", help="HOST:PORT; may be repeated")
    parser.add_argument("--drafter", action="append", default=[], metavar="ADDR", help="HOST:PORT; may be repeated")
    parser.add_argument(
        "--redis-url",
        default="memory:",
        metavar="URL",
        help="session log: a Redis, or file:PATH (default: memory:, lost with the process)",
    )
    parser.add_argument("--listen", default="127.0.0.1:0", metavar="ADDR", help="HOST:PORT, port 0 takes a free one")
    parser.add_argument("--start-timeout", type=float, default=120.0, metavar="S", help="wait for a verifier at start")
    parser.add_argument(
        "--plan",
        default="auto",
        metavar="PLAN",
        help="auto[:BRANCHES], off, lockstep:K or stream:CHUNK,RUN_AHEAD[,DUE[,BRANCHES]]",
    )
    add_registry_arguments(parser, "verifiers and drafters are found, and clients find this orchestrator")
    add_cloud_arguments(parser, "verifiers")
    add_serving_arguments(parser, "verifiers and drafters")
    add_http_arguments(parser, NO_HTTP)
    add_telemetry_arguments(parser)
    add_prompts_argument(parser)
    parser.add_argument("--json", action="store_true", help="print the ready line as one JSON object")


def add_serving_arguments(parser: argparse.ArgumentParser, peers: str) -> None:
    """Options on who may call and on encryption, for every command that runs an orchestrator."""
    parser.add_argument("--accept-drafters", action="store_true", help="let drafters dial in; they read every prompt")
    parser.add_argument(
        "--drafter-name",
        action="append",
        default=[],
        metavar="NAME",
        help="only these may dial in: a name in the drafter's certificate; may be repeated",
    )
    parser.add_argument("--drafter-keys", metavar="FILE", help="drafters that dial in must show a token of this file")
    add_drafters_per_session(parser)
    parser.add_argument(
        "--verifier-wait",
        type=float,
        default=VERIFIER_WAIT_S,
        metavar="S",
        help="how long a text waits for a verifier, which may have to load its model again (default: %(default)g s)",
    )
    add_log_arguments(parser)
    add_listening_arguments(parser, "clients")
    add_tenant_arguments(parser)
    add_client_arguments(parser, peers)


def options_of(args: argparse.Namespace) -> OrchestratorOptions:
    """Raises ValueError that names the option."""
    for field, addresses in (("listen", [args.listen]), ("verifier", args.verifier), ("drafter", args.drafter)):
        for address in addresses:
            check_listen(address, field)
    return serving_options(args, tuple(args.drafter), args.plan)


def serving_options(
    args: argparse.Namespace, drafters: tuple[str, ...] = (), plan: str = "auto"
) -> OrchestratorOptions:
    """The options of every command that runs an orchestrator. Raises ValueError that names the option."""
    return OrchestratorOptions(
        verifiers=tuple(args.verifier),
        drafters=drafters,
        redis_url=args.redis_url,
        durability=args.durability,
        retention=args.retention,
        listen=args.listen,
        insecure=args.insecure,
        tls=server_tls(args),
        peer_tls=client_tls(args),
        peer_token=read_peer_token(args),
        access=access_of(args, args.drafter_keys),
        accept_drafters=args.accept_drafters,
        drafter_names=tuple(args.drafter_name),
        drafters_per_session=args.drafters_per_session,
        start_timeout=args.start_timeout,
        verifier_wait=args.verifier_wait,
        plan=plan,
        http=http_of(args),
        chat_template=chat_template_of(args),
        tool_format=args.tool_format or "",
        http_access=http_access_of(args),
        sse_keep_alive=args.sse_keep_alive,
        metrics=args.metrics,
        log_prompts=args.log_prompts,
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
