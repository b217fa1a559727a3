"""`specwire doctor`: checks what is here and what is missing, and says what to do about it."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.util
import json
import os
from collections.abc import Iterator
from dataclasses import asdict

from deploy.cli.diagnosis.checks import (
    LIMIT_S,
    Finding,
    Grade,
    available_memory,
    bad,
    check_cores,
    check_log,
    check_memory,
    check_packages,
    check_placement,
    check_port,
    check_python,
    lines,
    ok,
    warn,
)
from deploy.cli.stack_address import explained, listed_stacks
from deploy.cli.terminal import wants_colour
from specwire.client import AsyncClient, SpecwireError
from specwire.core.invalid import InvalidParameter
from specwire.options import DEFAULT_HTTP, DEFAULT_LISTEN, add_options
from specwire.rpc.keys import read_token
from specwire.rpc.process import say
from specwire.rpc.server_options import check_listen
from specwire.rpc.tls import client_tls


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", metavar="MODEL", help="path or hub id: is it there, does it fit?")
    parser.add_argument(
        "--draft",
        action="append",
        default=[],
        metavar="MODEL",
        help="path or hub id: has it the target's tokens? may be repeated",
    )
    add_options(parser, "doctor", weights="of weights and caches")
    parser.add_argument("--slots", type=int, default=16, metavar="N", help="sessions at once (default: %(default)s)")
    parser.add_argument(
        "--redis-url", metavar="URL", help="session log: a Redis, or file:PATH (default: a private Redis)"
    )
    parser.add_argument("--durability", default="", metavar="LEVEL", help="what the log must survive, as of up")
    parser.add_argument("--listen", metavar="ADDR", help=f"is this HOST:PORT free? (default: {DEFAULT_LISTEN})")
    parser.add_argument("--http", metavar="ADDR", help=f"and this one? (default: {DEFAULT_HTTP})")
    parser.add_argument("--address", metavar="ADDR", help="does a stack serve there? (default: any that run here)")
    parser.add_argument(
        "--measure",
        action="store_true",
        help="load the target on each runtime in turn, and tell how long forwards of 1, 4 and 8 rows take there",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_options(parser, "client", peers="the stack at --address")


def run(args: argparse.Namespace) -> int:
    """1 if something must be mended."""
    try:
        _check(args)
        findings = asyncio.run(examine(args))
    except InvalidParameter as error:
        say(f"specwire doctor: error: {error}")
        return 2
    healthy = all(each.grade is not Grade.BAD for each in findings)
    if args.json:
        print(json.dumps({"ok": healthy, "findings": [asdict(each) for each in findings]}))
    else:
        print(lines(findings, wants_colour()))
    return 0 if healthy else 1


def _check(args: argparse.Namespace) -> None:
    for field in ("listen", "http", "address"):
        if getattr(args, field) is not None:
            check_listen(getattr(args, field), field)
    if not 1 <= args.slots <= 1024:
        raise InvalidParameter("slots", f"must be from 1 to 1024, not {args.slots}")
    if args.draft and not args.target:
        raise InvalidParameter("draft", "is held against a target: give --target, too")


async def examine(args: argparse.Namespace) -> list[Finding]:
    """All requested checks, and those of every machine."""
    models = list(await asyncio.to_thread(lambda: list(_models(args))))
    return [
        check_python(),
        *check_packages(bool(args.target)),
        check_cores(),
        check_placement(),
        check_memory(available_memory()),
        *models,
        *await check_log(args.redis_url, args.durability),
        check_port(args.listen or DEFAULT_LISTEN, "listen", args.listen is not None),
        check_port(args.http or DEFAULT_HTTP, "http", args.http is not None),
        *[await _check_stack(args, each) for each in _addresses(args)],
    ]


def _models(args: argparse.Namespace) -> Iterator[Finding]:
    """Only where torch is installed; `check_packages` says if it is not."""
    if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
        return
    models = importlib.import_module("deploy.cli.diagnosis.doctor_models")
    yield from models.check_devices()
    yield from models.check_choices()
    yield from models.check_models(args.target, args.draft, args.dtype, args.slots, available_memory())
    if args.measure and args.target:
        yield from models.measure(args.target, args.dtype)


def _addresses(args: argparse.Namespace) -> list[str]:
    return [args.address] if args.address else [each.address for each in listed_stacks()]


async def _check_stack(args: argparse.Namespace, address: str) -> Finding:
    tls, token = client_tls(args), read_token(args, os.environ)
    async with AsyncClient(address, tls=tls, token=token, patience=0) as client:
        try:
            info = await client.server_info(timeout=LIMIT_S)
        except SpecwireError as error:
            grade = bad if args.address else warn  # the listed ones were not asked for
            remedy = "start it, or mend address, encryption or token"
            return grade("stack", await explained(error, address, tls), remedy)
    drafters = ", ".join(each.model for each in info.drafters) or "no drafter"
    return ok("stack", f"{address} serves {info.target.model} with {drafters}, durability {info.durability}")
