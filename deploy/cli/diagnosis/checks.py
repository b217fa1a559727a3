"""What `specwire doctor` looks at on this machine and at its log, and how it tells what it finds. No torch in here."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import demo_pair
from deploy.cli.terminal import GREEN, RESET, YELLOW
from deploy.stack.hosts import CorePlan, threads_told
from deploy.stack.options import (
    StackError,
    StackOptions,
    target_threads,
)
from deploy.stack.redis_server import OLDEST, find_redis, parsed, version_of
from deploy.stack.stack import check_free
from orchestrator.options import http_is_installed
from orchestrator.store import StoreUnavailable, open_store
from specwire.options import cores
from specwire.redis import MEMORY, InvalidUrl, connection_of, path_of, place_of, without_password
from specwire.rpc.model_info import core_numbers
from specwire.rpc.process import visible

# ----------------------------------------------------------------------------------------------------------------------
# What `specwire doctor` finds, one line each.

RED = "\x1b[31m"


class Grade(StrEnum):
    """OK: as it should be. WARN: it works, with the stated restriction. BAD: it will not work."""

    OK = "ok"
    WARN = "warn"
    BAD = "bad"


COLOURS = {Grade.OK: GREEN, Grade.WARN: YELLOW, Grade.BAD: RED}


@dataclass(frozen=True, slots=True)
class Finding:
    """topic: what was looked at. text: what is there. remedy: what to do, "" for nothing."""

    grade: Grade
    topic: str
    text: str
    remedy: str = ""


def ok(topic: str, text: str) -> Finding:
    return Finding(Grade.OK, topic, text)


def warn(topic: str, text: str, remedy: str) -> Finding:
    return Finding(Grade.WARN, topic, text, remedy)


def bad(topic: str, text: str, remedy: str) -> Finding:
    return Finding(Grade.BAD, topic, text, remedy)


def lines(findings: Sequence[Finding], colour: bool) -> str:
    """A line for each."""
    width = max((len(each.topic) for each in findings), default=0)
    return "\n".join(_line(each, width, colour) for each in findings)


def _line(finding: Finding, width: int, colour: bool) -> str:
    grade = finding.grade.ljust(max(map(len, Grade)))
    grade = f"{COLOURS[finding.grade]}{grade}{RESET}" if colour else grade
    remedy = f" -> {finding.remedy}" if finding.remedy else ""
    return f"{grade}  {visible(f'{finding.topic.ljust(width)}  {finding.text}{remedy}', lines=False)}"


# ----------------------------------------------------------------------------------------------------------------------
# What this machine has: Python, packages, devices, cores, memory, free ports.

TESTED = ((3, 11), (3, 12))
CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")
# Extras of the package, what they bring, and what is missing without.
EXTRAS = (
    ("lm", ("torch", "transformers", "safetensors"), "no model can be served on this machine"),
    ("ray", ("ray",), "no specwire deploy"),
    ("openvino", ("openvino",), "no --runtime openvino"),
)


def check_python(found: tuple[int, int] = sys.version_info[:2]) -> Finding:
    name = f"{found[0]}.{found[1]}"
    if found < TESTED[0]:
        return bad("python", name, "install Python 3.11 or 3.12")
    return ok("python", name) if found in TESTED else warn("python", f"{name} is not tested", "use 3.11 or 3.12")


def check_packages(needs_models: bool) -> Iterator[Finding]:
    """needs_models: models were named, so without torch nothing works."""
    for extra, packages, lacking in EXTRAS:
        missing = [name for name in packages if importlib.util.find_spec(name) is None]
        if not missing:
            yield ok(extra, ", ".join(f"{name} {_version(name)}" for name in packages))
            continue
        grade = bad if needs_models and extra == "lm" else warn
        yield grade(extra, f"{', '.join(missing)} not installed: {lacking}", f"pip install 'specwire[{extra}]'")
    if http_is_installed():
        yield ok("http", ", ".join(f"{name} {_version(name)}" for name in ("starlette", "uvicorn")))
    else:
        yield warn("http", "not installed: gRPC only", "pip install 'specwire[http]'")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(without metadata)"


def check_cores(folder: Path = CGROUP) -> Finding:
    usable, quota = cores(), cpu_quota(folder)
    if quota is not None and quota < usable:
        threads = max(1, math.floor(quota))
        text = f"{usable} usable, but a quota of {quota:g}: more threads than that are stopped again and again"
        remedy = f"give --target-threads and --draft-threads {threads} in all"
        return warn("cores", text, remedy)
    return ok("cores", f"{usable} usable")


def check_placement() -> Finding:
    """Where threads are with `up --one-process` and no further option."""
    options = StackOptions(
        str(demo_pair.TARGET),
        str(demo_pair.DRAFT),
        target_threads=target_threads(None),
    )
    services = options.services()
    return ok("threads", f"up --one-process has {threads_told(services, CorePlan.of(core_numbers(), services))}")


def cpu_quota(folder: Path = CGROUP) -> float | None:
    """Cores' worth of time that the control group may use; None without a limit."""
    words = _read(folder / "cpu.max").split()
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0].isdecimal() else None


def available_memory(meminfo: Path = MEMINFO, folder: Path = CGROUP) -> int | None:
    """Bytes of memory that are available here; None where that is unknown."""
    free = [int(line.split()[1]) * 1024 for line in _read(meminfo).splitlines() if line.startswith("MemAvailable:")]
    limit, used = _read(folder / "memory.max").strip(), _read(folder / "memory.current").strip()
    if limit.isdecimal() and used.isdecimal():
        free.append(max(0, int(limit) - int(used)))
    return min(free, default=None)


def check_memory(available: int | None) -> Finding:
    if available is None:
        return warn("memory", "unknown: nobody says here how much is free", "see to it that the models fit")
    return ok("memory", f"{available / 2**30:.1f} GiB available")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def check_port(listen: str, field: str, asked: bool) -> Finding:
    """asked: the user wants just this port, so it must be free."""
    try:
        check_free(listen, field)
    except StackError as error:
        return (bad if asked else warn)("port", str(error), f"stop what listens there, or choose another --{field}")
    return ok("port", f"{listen} is free")


# ----------------------------------------------------------------------------------------------------------------------
# The session log: a server to start, or the one at a URL and how it is configured.

LIMIT_S = 5.0
# Releases of each line since which a script cannot run code in the server (CVE-2025-49844). Later lines began with it.
MENDED: dict[tuple[int, ...], int] = {(6, 2): 20, (7, 2): 11, (7, 4): 6, (8, 0): 4, (8, 2): 2}
SETTINGS = [("INFO",), ("CONFIG GET", "save")]


async def check_log(url: str | None, durability: str) -> list[Finding]:
    """None: a private server is started by `up` and `generate`."""
    if url is None:
        return await _check_own()
    if url == MEMORY:
        remedy = "give a Redis, or file:PATH, by --redis-url for more"
        return [warn("redis", "memory: the log is lost with its process", remedy)]
    try:
        in_file = place_of(url) == "file"
        if in_file and not path_of(url).exists():
            return [_check_folder(path_of(url).resolve().parent)]
        store = await open_store(url, LIMIT_S, durability)
    except (StoreUnavailable, InvalidUrl) as error:
        return [bad("redis", str(error), "start Redis there, or mend the URL or the level of durability")]
    await store.close()
    if in_file:
        return [ok("log", f"{url} can be used, durability {store.durability}")]
    return [ok("redis", f"{without_password(url)} answers, durability {store.durability}"), *await _settings(url)]


def _check_folder(folder: Path) -> Finding:
    """Whether a log can be made there."""
    if os.access(folder, os.W_OK | os.X_OK):
        return ok("log", f"it can be made in {folder}")
    return bad("log", f"no file can be made in {folder}", "make the folder, let this user write there, or name another")


async def _check_own() -> list[Finding]:
    try:
        server = await asyncio.to_thread(find_redis)
    except StackError as error:
        remedy = "pip install 'specwire[embedded-redis]', or --redis-url URL"
        return [bad("redis", f"no private server: {error}", remedy)]
    version = await asyncio.to_thread(version_of, server)
    shown = ".".join(map(str, version)) or "of unknown version"
    return [ok("redis", f"private server {shown}: {server}"), *_holes(version)]


def _holes(version: tuple[int, ...]) -> Iterator[Finding]:
    """Versions say what was released, not what a distribution has patched."""
    line, patch = version[:2], version[2:3]
    if version and line <= max(MENDED) and patch < (MENDED.get(line, math.inf),):
        text = f"version {'.'.join(map(str, version))} lets a script run code in the server (CVE-2025-49844)"
        since = ", ".join(f"{major}.{minor}.{at}" for (major, minor), at in MENDED.items())
        yield warn("redis", text, f"put a redis-server on PATH that is mended ({since}, or by your distribution)")


async def _settings(url: str) -> list[Finding]:
    """Findings about the settings of every server behind the URL."""
    lines = connection_of(url, LIMIT_S)
    try:
        async with asyncio.timeout(LIMIT_S):
            await lines.ready()
            answers = [await lines.send(node, SETTINGS) for node in lines.nodes()]
    except Exception as error:  # any error of the driver, for a server that just answered and does not now
        return [
            warn("redis", f"its settings cannot be read: {error}", "see docs/RELIABILITY.md for what they should be")
        ]
    finally:
        with suppress(Exception):
            await lines.close()
    return [finding for info, saves in answers if isinstance(info, dict) for finding in judge(info, _saves(saves))]


def _saves(answer: object) -> bool | None:
    """Whether snapshots are written; None where CONFIG is not allowed."""
    if not isinstance(answer, dict):
        return None
    return any(bool(value) for value in answer.values())


def judge(info: Mapping[str, Any], saves: bool | None) -> Iterator[Finding]:
    """What a server's INFO says about keeping logs."""
    found = str(info.get("redis_version", "0"))
    if parsed(found)[:2] < OLDEST:
        yield warn("redis", f"version {found} is not tested", "use 6.2 or newer")
    else:
        yield ok("redis", f"version {found}")
        if "valkey_version" not in info:  # it has its own version numbers
            yield from _holes(parsed(found))
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if policy != "noeviction":
        remedy = "CONFIG SET maxmemory-policy noeviction"
        yield warn("redis", f"maxmemory-policy {policy}: short of memory it drops sessions that run", remedy)
    if not info.get("aof_enabled") and saves is not True:
        certain = "writes nothing to disk" if saves is False else "has no append-only file"
        yield warn("redis", f"{certain}: its restart may lose sessions", "CONFIG SET appendonly yes")
