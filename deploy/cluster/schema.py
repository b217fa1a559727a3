"""The file of `specwire deploy`: pools of services, and orchestrators, each a group of equal replicas.

redis: redis://redis:6379/0           the session log, and the registry unless `registry` names another
region: eu-1
runtime_env: {env_vars: {HF_HOME: /models}}
pools:
  large:
    kind: verify                      or draft
    model: /models/large
    resources: {specwire_verify: 1}   of a replica, as Ray counts them
    accelerator_type: H100
    num_gpus: 1
    num_cpus: 4
    engine: specwire                  or vllm, then engine_options: {...} are its EngineArgs, and there may be
    tensor_parallel_size: 1
    pipeline_parallel_size: 1
    python: /opt/vllm/bin/python      on the nodes, of an environment with specwire[vllm]; else that of Ray's workers
    min_replicas: 1
    max_replicas: 4
    scaling: {queue_s: 1}             see docs/DEPLOY.md; between min and max
    options: {slots: 64}              of `specwire verify`, as its --help names them
orchestrators: {count: 2, grpc_port: 50051, http_port: 8000, options: {insecure: true}}
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from specwire.core.invalid import InvalidParameter
from specwire.core.model import SPECWIRE
from specwire.options import add_options, options_of
from specwire.registry.entry import check_region
from specwire.registry.options import RegistryOptions
from specwire.rpc.process import DRAIN_GRACE
from specwire.rpc.server_options import MOST_RANKS

# ----------------------------------------------------------------------------------------------------------------------
# A mapping of a YAML file, taken apart by name and type.

MOST_AMOUNT = 1 << 20


class InvalidConfig(ValueError):
    """One sentence that names the key, as pools.large.kind, and its value."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}")


class YamlKeys:
    """A mapping, taken apart by name and type. Raises InvalidConfig. `place`: of the mapping, "" of the whole file."""

    def __init__(self, place: str, value: object) -> None:
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise InvalidConfig(place or "file", f"must be a mapping, not {value!r}")
        self._place = place
        self._left = dict(value)

    def of(self, name: str) -> str:
        """A key's name for people."""
        return f"{self._place}.{name}" if self._place else name

    def end(self) -> None:
        """Refuse keys that were not taken."""
        for name in self._left:
            raise InvalidConfig(self.of(name), "is not known")

    def text(self, name: str, default: str | None = None) -> str:
        value = self._left.pop(name, default)
        if value is None:
            raise InvalidConfig(self.of(name), "is missing")
        if not isinstance(value, str) or not value.isprintable() or (value == "" and default is None):
            raise InvalidConfig(self.of(name), f"must be a text, not {value!r}")
        return value

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        value = self.text(name)
        if value not in choices:
            raise InvalidConfig(self.of(name), f"must be one of {', '.join(choices)}, not {value!r}")
        return value

    def count(self, name: str, default: int, least: int, most: int) -> int:
        value = self._left.pop(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise InvalidConfig(self.of(name), f"must be a whole number from {least} to {most}, not {value!r}")
        return value

    def optional_count(self, name: str, least: int, most: int) -> int | None:
        return self.count(name, least, least, most) if self._left.get(name) is not None else None

    def amount(self, name: str, default: float, most: float = MOST_AMOUNT) -> float:
        """`default` is what it is where nothing is said."""
        if name not in self._left:
            return default
        value = self._left.pop(name)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= most:
            raise InvalidConfig(self.of(name), f"must be a number from 0 to {most:.10g}, not {value!r}")
        return float(value)

    def mapping(self, name: str) -> dict[Any, Any]:
        value = self._left.pop(name, None)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise InvalidConfig(self.of(name), f"must be a mapping, not {value!r}")
        return value


# ----------------------------------------------------------------------------------------------------------------------
# Options of a service as its command line, checked by the table of options.


class _OptionsParser(argparse.ArgumentParser):
    """prog: the key that its errors name."""

    def error(self, message: str) -> NoReturn:
        raise InvalidConfig(self.prog, message.removeprefix("argument "))


def words_of(key: str, command: str, first: Sequence[str], options: Mapping[str, Any]) -> tuple[str, ...]:
    """The command line that `options` by their names make, behind what it must begin with. Raises InvalidConfig."""
    known = {option.name: option for _, option in options_of(command)}
    words = [*first]
    for name, value in options.items():
        row = known.get(name)
        if value is False and row is None:
            raise InvalidConfig(key, f"--{name}: is not known")
        if isinstance(value, bool):
            words += row.words(value) if row is not None and row.kind is bool else [f"--{name}"] * value
            continue
        for each in value if isinstance(value, list) else [value]:
            if not isinstance(each, (str, int, float)):
                raise InvalidConfig(key, f"--{name}: must be a value or a list of values, not {value!r}")
            words.append(f"--{name}={each}")
    parser = _OptionsParser(prog=key, allow_abbrev=False)
    add_options(parser, command)
    parser.parse_args(words)
    return (command, *words)


NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?")
ORCHESTRATORS = "orchestrators"
KINDS = ("verify", "draft")
TENSOR, PIPELINE = "tensor_parallel_size", "pipeline_parallel_size"
MOST_REPLICAS = 1024
DIGEST_CHARACTERS = 10
# Groups that differ only in these have the same replicas.
NOT_MADE_BY = ("name", "least", "most", "grace", "scaling")
# What `scaling` of a pool may say, and the most that each may be.
SCALING = {
    "high": 1.0,
    "low": 1.0,
    "grow_after_s": 86400.0,
    "shrink_after_s": 86400.0,
    "queue_s": 3600.0,
}
# Grace of a verifier unless `options` says another. Sessions that no other one can take, because their weights were
# replaced, end in this time.
VERIFY_GRACE_S = 120
# Beyond the grace of a service that drains.
DRAIN_MARGIN_S = 30.0
# What the deployment itself says to a service.
OWN_OPTIONS = (
    "listen",
    "advertise",
    "registry",
    "region",
    "json",
    "config",
    "tensor-parallel-size",
    "pipeline-parallel-size",
    "engine",
    "engine-options",
    "redis-url",
    "http",
)


@dataclass(frozen=True, slots=True)
class ScalingRule:
    """least, most: replicas. high, low: shares of the slots; times are seconds.

    queue_s: a session may wait as long for a slot before the pool counts as full.

    Invariant: low < high, so that a pool which has just shrunk is not at once to grow.
    """

    least: int
    most: int
    high: float = 0.85
    low: float = 0.5
    grow_after_s: float = 10.0
    shrink_after_s: float = 300.0
    queue_s: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most or self.most < 1:
            raise ValueError(f"replicas: must be 0 <= min <= max and max >= 1, not {self.least} and {self.most}")
        if not 0 < self.low < self.high <= 1:
            raise ValueError(f"occupancy: must be 0 < low < high <= 1, not {self.low} and {self.high}")
        if not min(self.grow_after_s, self.shrink_after_s, self.queue_s) >= 0:
            raise ValueError(
                f"times: must not be negative, not {self.grow_after_s}, {self.shrink_after_s}, {self.queue_s}"
            )


@dataclass(frozen=True, slots=True)
class Group:
    """Equal replicas of a service.

    words: the command line of a replica after `specwire`, without where it listens and who it registers with.
    port, http_port: fixed ones, 0 for any; the latter of orchestrators only, -1 for no HTTP.
    python: on the node, of the environment that its service runs in; "" for that of Ray's workers. ranks: processes
    that share a replica's model.
    least, most: replicas. grace: seconds that a replica takes to end at most. scaling: what else there is to say in a
    `ScalingRule`. The rest is what Ray is asked for, for each replica.
    """

    name: str
    words: tuple[str, ...]
    least: int
    most: int
    environment: Mapping[str, str] = field(default_factory=dict)
    port: int = 0
    http_port: int = -1
    grace: float = 0.0
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    accelerator_type: str = ""
    resources: Mapping[str, float] = field(default_factory=dict)
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    scaling: Mapping[str, float] = field(default_factory=dict)
    python: str = ""
    ranks: int = 1

    @property
    def digest(self) -> str:
        """Digest of all that a replica is made by: two groups with one digest have the same replicas."""
        made_by = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in NOT_MADE_BY}
        return hashlib.sha256(json.dumps(made_by, sort_keys=True).encode()).hexdigest()[:DIGEST_CHARACTERS]

    @property
    def scales(self) -> bool:
        """Its replicas are as many as its load asks for."""
        return self.least < self.most

    @property
    def rule(self) -> ScalingRule:
        return ScalingRule(self.least, self.most, **self.scaling)

    def clamped(self, replicas: int) -> int:
        return min(max(replicas, self.least), self.most)


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """registry: the URL where all services meet."""

    registry: str
    groups: tuple[Group, ...]

    def group(self, name: str) -> Group | None:
        return next((group for group in self.groups if group.name == name), None)


def read_text(file: Path) -> str:
    """Raises InvalidConfig."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidConfig(str(file), f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InvalidConfig(str(file), f"is not UTF-8 at byte {error.start}") from None


def parse(text: str) -> ClusterConfig:
    """Raises InvalidConfig."""
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise InvalidConfig("file", f"is no YAML: {' '.join(str(error).split()) or 'nested too deeply'}") from None
    top = YamlKeys("", value)
    redis = top.text("redis")
    registry = top.text("registry", redis)
    region = top.text("region", "")
    _check_place(registry, region)
    runtime_env = top.mapping("runtime_env")
    shared = {"registry": registry, "region": region, "redis": redis}
    pools = top.mapping("pools")
    groups = [_pool(name, YamlKeys(f"pools.{name}", value), shared, runtime_env) for name, value in pools.items()]
    if not any(group.words[0] == "verify" for group in groups):
        raise InvalidConfig("pools", "at least one of kind verify is needed")
    groups.append(_orchestrators(YamlKeys(ORCHESTRATORS, top.mapping(ORCHESTRATORS)), shared, runtime_env))
    top.end()
    return ClusterConfig(registry, tuple(groups))


def _check_place(registry: str, region: str) -> None:
    try:
        RegistryOptions(registry)
        check_region(region)
    except InvalidParameter as error:
        raise InvalidConfig(*_split(str(error))) from None


def _split(sentence: str) -> tuple[str, str]:
    key, _, rest = sentence.partition(": ")
    return key, rest


def _pool(name: str, keys: YamlKeys, shared: Mapping[str, str], runtime_env: Mapping[str, Any]) -> Group:
    if not NAME.fullmatch(str(name)) or name == ORCHESTRATORS:
        raise InvalidConfig("pools", f"a name must be at most 40 of a-z 0-9 -, and not {ORCHESTRATORS}, not {name!r}")
    kind, model = keys.choice("kind", KINDS), keys.text("model")
    least = keys.count("min_replicas", 1, least=0, most=MOST_REPLICAS)
    most = keys.count("max_replicas", max(least, 1), least=max(least, 1), most=MOST_REPLICAS)
    tensor, stages = (keys.count(size, 1, least=1, most=MOST_RANKS) for size in (TENSOR, PIPELINE))
    if stages > MOST_RANKS // tensor:
        most_stages = f"must be at most {MOST_RANKS // tensor} beside {TENSOR} {tensor}"
        raise InvalidConfig(keys.of(PIPELINE), f"{most_stages}, not {stages}")
    first = _engine(keys, kind, tensor, stages)
    options = _options(keys)
    if kind == "verify":
        options = {"grace": VERIFY_GRACE_S, **options}
    words = words_of(keys.of("options"), kind, (model, *first), options)
    group = Group(
        name,
        words,
        least,
        most,
        _environment(shared),
        grace=_grace(words),
        **_asked_for(keys, 1.0),
        runtime_env=dict(runtime_env),
        scaling=_scaling(keys, least, most),
        python=_python(keys),
        ranks=tensor * stages,
    )
    if 0 < group.num_gpus < group.ranks:
        asked = f"must be at least {group.ranks}, one for each rank, or 0, not {group.num_gpus:g}"
        raise InvalidConfig(keys.of("num_gpus"), asked)
    keys.end()
    return group


def _python(keys: YamlKeys) -> str:
    python = keys.text("python", "")
    if python and not python.startswith("/"):
        raise InvalidConfig(keys.of("python"), f"must be an absolute path on the nodes, not {python!r}")
    return python


def _engine(keys: YamlKeys, kind: str, tensor: int, stages: int) -> tuple[str, ...]:
    """What a verifier's forwards are computed with, as on its command line."""
    engine, options = keys.text("engine", SPECWIRE), keys.mapping("engine_options")
    if kind != "verify" and engine != SPECWIRE:
        raise InvalidConfig(keys.of("engine"), f"is of verifiers only, not {engine}")
    words: tuple[str, ...] = (f"--engine={engine}",) if engine != SPECWIRE else ()
    if options and engine == SPECWIRE:
        raise InvalidConfig(keys.of("engine_options"), f"are of engine: vllm only, not {options}")
    for name, size in ((TENSOR, tensor), (PIPELINE, stages)):
        if size > 1 and engine == SPECWIRE:
            raise InvalidConfig(keys.of(name), f"is of engine: vllm only, not {size}")
        words += (f"--{name.replace('_', '-')}={size}",) if size > 1 else ()
    return words + ((f"--engine-options={json.dumps(options)}",) if options else ())


def _scaling(keys: YamlKeys, least: int, most: int) -> dict[str, float]:
    inner = YamlKeys(keys.of("scaling"), keys.mapping("scaling"))
    said = {name: inner.amount(name, math.nan, most=limit) for name, limit in SCALING.items()}
    inner.end()
    found = {name: value for name, value in said.items() if not math.isnan(value)}
    try:
        ScalingRule(least, most, **found)
    except ValueError as error:
        raise InvalidConfig(keys.of("scaling"), str(error)) from None
    return found


def _orchestrators(keys: YamlKeys, shared: Mapping[str, str], runtime_env: Mapping[str, Any]) -> Group:
    count = keys.count("count", 1, least=1, most=MOST_REPLICAS)
    grpc_port = keys.count("grpc_port", 0, least=0, most=65535)
    http_port = keys.optional_count("http_port", least=0, most=65535)
    words = words_of(keys.of("options"), "orchestrate", (), _options(keys))
    environment = {**_environment(shared), "SPECWIRE_REDIS_URL": shared["redis"]}
    group = Group(
        ORCHESTRATORS,
        words,
        count,
        count,
        environment,
        grpc_port,
        -1 if http_port is None else http_port,
        _grace(words),
        **_asked_for(keys, 1.0),
        runtime_env=dict(runtime_env),
    )
    keys.end()
    return group


def _environment(shared: Mapping[str, str]) -> dict[str, str]:
    """URLs may hold passwords, and everybody on a machine reads its command lines."""
    found = {"SPECWIRE_REGISTRY": shared["registry"], "SPECWIRE_REGION": shared["region"]}
    return {name: value for name, value in found.items() if value}


def _options(keys: YamlKeys) -> dict[str, Any]:
    options = {str(name).replace("_", "-"): value for name, value in keys.mapping("options").items()}
    for name in options:
        if name in OWN_OPTIONS:
            raise InvalidConfig(f"{keys.of('options')}.{name}", "is said by the deployment itself: leave it out")
    return options


def _grace(words: tuple[str, ...]) -> float:
    """Seconds of grace in a command line that has been checked."""
    said = [word.removeprefix("--grace=") for word in words if word.startswith("--grace=")]
    return float(said[-1]) if said else DRAIN_GRACE


def _asked_for(keys: YamlKeys, cpus: float) -> dict[str, Any]:
    resources = keys.mapping("resources")
    inner = YamlKeys(keys.of("resources"), resources)
    return {
        "num_cpus": keys.amount("num_cpus", cpus),
        "num_gpus": keys.amount("num_gpus", 0.0),
        "accelerator_type": keys.text("accelerator_type", ""),
        "resources": {str(name): inner.amount(name, 0.0) for name in resources},
    }


RAY_AUTH_MODE = "RAY_AUTH_MODE"


def ray_token() -> tuple[str, str]:
    """The token that Ray's clusters may demand, and where it is from, for people; empty where there is none.

    Read from the places where Ray looks for it. Ray itself shows a token to a running cluster only if it is told to.
    """
    if os.environ.get(RAY_AUTH_MODE, "token") != "token":
        return "", ""
    if token := os.environ.get("RAY_AUTH_TOKEN", ""):
        return token, "$RAY_AUTH_TOKEN"
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    try:
        return file.read_text(encoding="utf-8").strip(), str(file)
    except (OSError, UnicodeDecodeError):
        return "", ""
