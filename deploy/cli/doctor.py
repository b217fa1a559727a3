"""`specwire doctor`: what is here, what is missing, and what to do about it."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.util
import json
import os
from collections.abc import Iterator
from dataclasses import asdict

from deploy.cli import doctor_checks as machine
from deploy.cli.doctor_checks import (
    Finding,
    Grade,
    bad,
    check_log,
    lines,
    ok,
    warn,
)
from deploy.cli.terminal import wants_colour
from deploy.cli.where import explained, listed_stacks
from deploy.stack.options import DEFAULT_HTTP, DEFAULT_LISTEN
from specwire.client import AsyncClient, SpecwireError
from specwire.core.invalid import InvalidParameter
from specwire.rpc.keys import read_token
from specwire.rpc.listening import check_listen
from specwire.rpc.model_service import DTYPES
from specwire.rpc.process import say
from specwire.rpc.tls import add_client_arguments, client_tls

LIMIT_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", metavar="MODEL", help="path or hub id: is it there, does it fit?")
    parser.add_argument(
        "--draft",
        action="append",
        default=[],
        metavar="MODEL",
        help="path or hub id: has it the target's tokens? may be repeated",
    )
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="of weights and caches")
    parser.add_argument("--slots", type=int, default=16, metavar="N", help="sessions at once (default: %(default)s)")
    parser.add_argument("--redis-url", metavar="URL", help="session log (default: a private Redis)")
    parser.add_argument("--durability", default="", metavar="LEVEL", help="what the log must survive, as of up")
    parser.add_argument("--listen", metavar="ADDR", help=f"is this HOST:PORT free? (default: {DEFAULT_LISTEN})")
    parser.add_argument("--http", metavar="ADDR", help=f"and this one? (default: {DEFAULT_HTTP})")
    parser.add_argument("--address", metavar="ADDR", help="does a stack serve there? (default: any that run here)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_client_arguments(parser, "the stack at --address", variable=True)


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
    """Everything that was asked for, and what every machine needs."""
    models = list(await asyncio.to_thread(lambda: list(_models(args))))
    return [
        machine.check_python(),
        *machine.check_packages(bool(args.target)),
        machine.check_cores(),
        machine.check_memory(machine.available_memory()),
        *models,
        *await check_log(args.redis_url, args.durability),
        machine.check_port(args.listen or DEFAULT_LISTEN, "listen", args.listen is not None),
        machine.check_port(args.http or DEFAULT_HTTP, "http", args.http is not None),
        *[await _check_stack(args, each) for each in _addresses(args)],
    ]


def _models(args: argparse.Namespace) -> Iterator[Finding]:
    """Only where torch is installed; `check_packages` says if it is not."""
    if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
        return
    models = importlib.import_module("deploy.cli.doctor_models")
    yield from models.check_devices()
    yield from models.check_models(args.target, args.draft, args.dtype, args.slots, machine.available_memory())


def _addresses(args: argparse.Namespace) -> list[str]:
    return [args.address] if args.address else [each.address for each in listed_stacks()]


async def _check_stack(args: argparse.Namespace, address: str) -> Finding:
    tls, token = client_tls(args), read_token(args, os.environ)
    async with AsyncClient(address, tls=tls, token=token, patience=0) as client:
        try:
            info = await client.server_info(timeout=LIMIT_S)
        except SpecwireError as error:
            grade = bad if args.address else warn  # nobody has asked for one that is listed
            remedy = "start it, or mend address, encryption or token"
            return grade("stack", await explained(error, address, tls), remedy)
    drafters = ", ".join(each.model for each in info.drafters) or "no drafter"
    return ok("stack", f"{address} serves {info.target.model} with {drafters}, durability {info.durability}")
