"""Tenants of a verifier: who they are, by token or certificate, and what each may have (`--tenants FILE`).

The file is YAML: limits by name, `"*"` for each tenant that is not named. All limits are optional:

    berlin: {weight: 2, sessions: 200, slots: 16, kv_memory: 8G, tokens: 800, rows: 32, prefill: 4000}
    "*": {sessions: 20}

A tenant's name is the holder of the token that its link shows (`--api-keys`); without tokens a name in its certificate,
one that the file has if there is one, else the common name. Links without either are one tenant together.
"""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from specwire.core.invalid import InvalidParameter
from specwire.rpc.errors import Context
from specwire.rpc.keys import Keys
from specwire.rpc.renewal import Origin
from specwire.rpc.server import certified_names, common_name
from specwire.rpc.server_options import size_of
from verify_service.engine.shares import NO_LIMITS, TenantLimits, TenantShares

FLAG = "--tenants"
EVERYBODY_ELSE = "*"
# What the file calls the limit of bytes: it may be written as a size.
MEMORY = "kv_memory"
COUNTS = tuple(each.name for each in fields(TenantLimits) if each.name not in ("weight", "kv_bytes"))
LIMITS = ("weight", MEMORY, *COUNTS)
# Limits by name, and those of everybody else.
TenantTable = tuple[dict[str, TenantLimits], TenantLimits]


def tenants_of(file: str | None) -> Origin[TenantTable] | None:
    """None without a file. InvalidParameter names the tenant and the limit that is wrong."""
    return None if file is None else Origin((file,), partial(_table, file))


def _table(file: str) -> TenantTable:
    try:
        told = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidParameter(FLAG, f"{file} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidParameter(FLAG, f"{file} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(told, dict) or not all(isinstance(name, str) for name in told):
        raise InvalidParameter(FLAG, f"{file} must map names of tenants to their limits")
    named = {name: _limits(f"{file}, {name}", limits) for name, limits in told.items()}
    other = named.pop(EVERYBODY_ELSE, NO_LIMITS)
    return named, other


def _limits(place: str, told: Any) -> TenantLimits:
    told = {} if told is None else told
    if not isinstance(told, dict):
        raise InvalidParameter(FLAG, f"{place}: must be limits by name, not {told!r:.80}")
    for name, value in told.items():
        if name not in LIMITS:
            raise InvalidParameter(FLAG, f"{place}: {name!r:.40} is none of {', '.join(LIMITS)}")
        kinds = int | float if name == "weight" else int | str if name == MEMORY else int
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise InvalidParameter(FLAG, f"{place}: {name} must be a number, not {value!r:.40}")
    try:
        kv_bytes = size_of(FLAG, str(told[MEMORY])) if MEMORY in told else None
        counts = {name: told[name] for name in COUNTS if name in told}
        return TenantLimits(weight=float(told.get("weight", 1.0)), kv_bytes=kv_bytes, **counts)
    except InvalidParameter as error:
        message = str(error).removeprefix(f"{error.field}: ")
        raise InvalidParameter(FLAG, f"{place}: {message}") from None


def tenant_of(context: Context, keys: Keys | None, shares: TenantShares) -> str:
    """Whose link it is; "" where nothing tells. Raises StatusError (UNAUTHENTICATED) for an unknown token."""
    if keys is not None:
        return keys.holder(context.invocation_metadata() or ())
    known = sorted(name for name in certified_names(context) if name in shares.named)
    return known[0] if known else common_name(context)
