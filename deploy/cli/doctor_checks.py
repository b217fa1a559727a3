"""What `specwire doctor` looks at: the machine, the models, the session log."""

from __future__ import annotations

import asyncio
import importlib.util
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from deploy.cli.terminal import GREEN, RESET, YELLOW
from deploy.stack.options import StackError, cores
from deploy.stack.redis_server import OLDEST, find_redis, parsed, version_of
from deploy.stack.stack import check_free
from orchestrator.options import http_is_installed
from orchestrator.store import StoreUnavailable, open_store
from specwire.lm.load import outline
from specwire.lm.scripted import PREFIX, ScriptedLM
from specwire.lm.slots import position_bytes, readable
from specwire.redis.urls import MEMORY, lines_of, without_password
from specwire.rpc.process import visible
from specwire.text.detokenizer import vocabulary_fingerprint

# ----------------------------------------------------------------------------------------------------------------------
# What `specwire doctor` finds, one line each.

RED = "\x1b[31m"


class Grade(StrEnum):
    """OK: as it should be. WARN: it works, with what the text says. BAD: what was asked for will not work."""

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
    ("ray", ("ray",), "specwire up needs --no-ray"),
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
        return warn("cores", text, f"give --target-threads and --draft-threads {threads} in all")
    return ok("cores", f"{usable} usable")


def cpu_quota(folder: Path = CGROUP) -> float | None:
    """Cores' worth of time that the control group may use; None without a limit."""
    words = _read(folder / "cpu.max").split()
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0].isdecimal() else None


def available_memory(meminfo: Path = MEMINFO, folder: Path = CGROUP) -> int | None:
    """Bytes that may still be taken here; None where nobody says."""
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
    """asked: somebody wants just this one, so that it must be free."""
    try:
        check_free(listen, field)
    except StackError as error:
        return (bad if asked else warn)("port", str(error), f"stop what listens there, or choose another --{field}")
    return ok("port", f"{listen} is free")


# ----------------------------------------------------------------------------------------------------------------------
# A target and its drafters: do they mean the same by an id, and do they fit into memory? No weights are loaded.
#
# Imports torch and transformers.

# Of the memory that is available, what weights and caches may take: forwards need some, too.
SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Facts:
    """kv_bytes: of one slot. weight_bytes: in the asked dtype; None where the files are not here."""

    model: str
    vocabulary: str
    ids: int
    context: int
    kv_bytes: int
    weight_bytes: int | None


def check_devices() -> Iterator[Finding]:
    devices = [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    if devices:
        yield ok("devices", ", ".join(devices))
    elif torch.version.cuda and Path("/proc/driver/nvidia").exists():
        yield warn("devices", "cpu only, though this machine has an NVIDIA driver", "look at nvidia-smi")
    else:
        yield ok("devices", "cpu")


def check_models(
    target: str | None, drafts: list[str], dtype: str, slots: int, available: int | None
) -> Iterator[Finding]:
    """available: bytes of memory, None where nobody knows."""
    known: dict[str, Facts] = {}
    for model in dict.fromkeys([*([target] if target else []), *drafts]):
        try:
            known[model] = facts_of(model, dtype)
        except Exception as error:  # whatever a broken directory, or an unreachable hub, makes the library raise
            reason = str(error).strip().partition("\n")[0]
            yield bad("model", f"{model} cannot be read: {reason}", "give a directory with a model, or a hub id")
    if target in known:
        for draft in (each for each in drafts if each in known):
            yield _check_pair(known[target], known[draft])
    for facts in known.values():
        yield _describe(facts, slots)
    yield from _check_fit(list(known.values()), slots, available)


def facts_of(model: str, dtype: str) -> Facts:
    """Raises ModelError for whatever `verify` and `draft` refuse before they load the weights."""
    if model.startswith(PREFIX):
        info = ScriptedLM.parse(model, slots=1).info
        return Facts(model, info.vocabulary_fingerprint, info.vocabulary, info.context, 0, 0)
    known = outline(model)
    config, precision = known.config, getattr(torch, dtype)
    tokens = known.text.vocabulary(config.get_text_config().vocab_size)
    kv, weights = known.context * position_bytes(config, precision), _weight_bytes(known.location, config, precision)
    return Facts(model, vocabulary_fingerprint(tokens), len(tokens), known.context, kv, weights)


def _weight_bytes(path: str, config: object, dtype: torch.dtype) -> int | None:
    """From the files' size, in which the configuration's dtype is stored."""
    files = list(Path(path).glob("*.safetensors")) if Path(path).is_dir() else []
    stored = getattr(config, "dtype", None)
    width = stored.itemsize if isinstance(stored, torch.dtype) else 4
    return sum(file.stat().st_size for file in files) * dtype.itemsize // width if files else None


def _check_pair(target: Facts, draft: Facts) -> Finding:
    if target.vocabulary == draft.vocabulary:
        return ok("pair", f"{draft.model} and {target.model} have the same {target.ids} tokens")
    text = f"{draft.model} has {draft.ids} tokens, {target.model} {target.ids}, and they are not the same"
    return bad("pair", text, "choose a draft model with the target's tokenizer, of the same family")


def _describe(facts: Facts, slots: int) -> Finding:
    weights = "" if facts.weight_bytes is None else f", weights {readable(facts.weight_bytes)}"
    cache = f"{slots} sessions of {facts.context} tokens {readable(slots * facts.kv_bytes)}"
    return ok("model", f"{facts.model}: {facts.ids} tokens{weights}, {cache}")


def _check_fit(known: list[Facts], slots: int, available: int | None) -> Iterator[Finding]:
    if available is None or not known:
        return
    needed = sum(slots * each.kv_bytes + (each.weight_bytes or 0) for each in known)
    if needed <= SHARE * available:
        yield ok("memory", f"{readable(needed)} of {readable(available)} needed for models and caches")
        return
    caches = sum(each.kv_bytes for each in known)
    room = SHARE * available - sum(each.weight_bytes or 0 for each in known)
    remedy = f"--slots {int(room // caches)}" if caches and room >= caches else "a shorter --context, or smaller models"
    yield bad("memory", f"{readable(needed)} needed for models and caches, {readable(available)} available", remedy)


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
        return [warn("redis", "memory: the log is lost with its process", "give a Redis by --redis-url for more")]
    try:
        store = await open_store(url, LIMIT_S, durability)
    except StoreUnavailable as error:
        return [bad("redis", str(error), "start Redis there, or mend the URL or the level of durability")]
    await store.close()
    return [ok("redis", f"{without_password(url)} answers, durability {store.durability}"), *await _settings(url)]


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
    """Versions say what was released, not what a distribution has mended in its own build."""
    line, patch = version[:2], version[2:3]
    if version and line <= max(MENDED) and patch < (MENDED.get(line, math.inf),):
        text = f"version {'.'.join(map(str, version))} lets a script run code in the server (CVE-2025-49844)"
        since = ", ".join(f"{major}.{minor}.{at}" for (major, minor), at in MENDED.items())
        yield warn("redis", text, f"put a redis-server on PATH that is mended ({since}, or by your distribution)")


async def _settings(url: str) -> list[Finding]:
    """Of every server behind the URL."""
    lines = lines_of(url, LIMIT_S)
    try:
        async with asyncio.timeout(LIMIT_S):
            await lines.ready()
            answers = [await lines.send(node, SETTINGS) for node in lines.nodes()]
    except Exception as error:  # whatever the driver makes of a server that just answered and does not now
        return [
            warn("redis", f"its settings cannot be read: {error}", "see docs/SESSION_LOG.md for what they should be")
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
        if "valkey_version" not in info:  # it goes by numbers of its own
            yield from _holes(parsed(found))
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if policy != "noeviction":
        remedy = "CONFIG SET maxmemory-policy noeviction"
        yield warn("redis", f"maxmemory-policy {policy}: short of memory it drops sessions that run", remedy)
    if not info.get("aof_enabled") and saves is not True:
        certain = "writes nothing to disk" if saves is False else "has no append-only file"
        yield warn("redis", f"{certain}: its restart may lose sessions", "CONFIG SET appendonly yes")
