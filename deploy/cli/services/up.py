"""`specwire up`: the whole stack on this machine until a signal comes."""

from __future__ import annotations

import argparse
import asyncio
import json
from contextlib import nullcontext
from pathlib import Path

from deploy.cli.main import run_owned
from deploy.cli.stack_address import ListedStack, listed
from deploy.stack import stack
from deploy.stack.options import StackOptions, stack_options
from orchestrator.options import and_http, chat_template_of, http_access_of, http_is_installed, http_of
from orchestrator.tenants import access_of
from specwire.core.invalid import InvalidParameter
from specwire.named_models import REAL, how_to_get
from specwire.options import DEFAULT_HTTP, STACK, add_options
from specwire.progress import LAST_LINE
from specwire.rpc.process import Footprint, say
from specwire.rpc.server_options import ANY_PORT, drain_grace
from specwire.rpc.tls import server_tls
from specwire.telemetry.options import telemetry_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, STACK)
    add_options(parser, "up")


def run(args: argparse.Namespace) -> int:
    try:
        options = stack_options(
            args,
            also=tuple(args.also),
            http=_http(args),
            chat_template=chat_template_of(args),
            http_access=http_access_of(args),
            tls=server_tls(args),
            access=access_of(args),
            grace=drain_grace(args),
        )
        telemetry = telemetry_of(args)
    except InvalidParameter as error:
        say(f"specwire up: error: {error}")
        return 2
    if args.target is None:
        say(f"specwire up: the included pair; for a real model: {how_to_get(REAL)}, then --target {REAL}")
    telemetry.start("orchestrator")
    return run_owned("up", lambda folder: _serve(options, folder, args.json, args.unlisted))


async def _serve(options: StackOptions, folder: Path, as_json: bool, unlisted: bool) -> int:
    LAST_LINE.quiet = as_json
    running = await stack.start(options, folder)
    try:
        with nullcontext() if unlisted else listed(_listed(running)):
            if options.one_process:
                say(f"specwire: {Footprint.now()}")
            print(_ready_object(running) if as_json else _ready_line(running), flush=True)
            say(f"specwire up: error: {await running.failed()}")
            return 1
    except asyncio.CancelledError:
        say("specwire: shutting down")
        return 0
    finally:
        await running.stop()


def _http(args: argparse.Namespace) -> str:
    """Where to listen for HTTP. It is on where that is possible; if it was asked for and is not, the error says why."""
    if args.http or http_is_installed():
        any_port = args.listen.endswith(":0")
        args.http = args.http or (ANY_PORT if any_port else DEFAULT_HTTP)
        return http_of(args)
    say("specwire up: no HTTP: it needs the extra, pip install 'specwire[http]'")
    return ""


def _listed(running: stack.Stack) -> ListedStack:
    options = running.options
    return ListedStack(running.address, running.http, options.target, options.tls is not None)


def _ready_line(running: stack.Stack) -> str:
    options = running.options
    draft = f"draft {', '.join((options.draft, *options.more_drafts))}" if options.draft else "no draft"
    where = f"{running.address}{and_http(running.http)}"
    return f"specwire: ready on {where} (target {options.target}, {draft}, log {running.redis_url})"


def _ready_object(running: stack.Stack) -> str:
    options = running.options
    ready = {
        "address": running.address,
        "http": running.http,
        "redis": running.redis_url,
        "services": running.services,
        "target": options.target,
        "draft": options.draft,
        **(Footprint.now()._asdict() if options.one_process else {}),
    }
    return json.dumps(ready)
