"""What the tests of a Ray cluster share: a deployment of scripted models, and sessions whose text must be plain."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from bench.cluster.site import Site
from tests.faults.streams import PROMPT, Stream, plain

LIMIT_S = 120.0
NAME, MODEL = "scripted:7", "scripted:7:vocab=64"
OTHER_NAME, OTHER_MODEL = "scripted:8", "scripted:8:vocab=64"
# More than there is time for: a session that ends by itself would not have been moved.
LENGTH = 4000
# A text goes on: so many tokens.
MORE = 10
Pool = Mapping[str, Any]
OTHER: dict[str, Pool] = {
    "other": {
        "kind": "verify",
        "model": OTHER_MODEL,
        "resources": {"big": 1},
        "options": {"insecure": True, "grace": 0.5},
    }
}


def file_of(here: Site, pools: Mapping[str, Pool], orchestrators: Pool) -> str:
    """A file of `specwire deploy`, each of whose replicas takes next to no core; JSON is YAML."""
    front = {"resources": {"front": 1}, "options": {"insecure": True}, "num_cpus": 0.1}
    light = {name: {"num_cpus": 0.1, **pool} for name, pool in pools.items()}
    return json.dumps({"redis": f"redis://{here.redis}/0", "pools": light, "orchestrators": {**front, **orchestrators}})


def deploy(
    here: Site,
    least: int,
    most: int,
    orchestrators: int = 1,
    slots: int = 8,
    more: Mapping[str, Pool] = MappingProxyType({}),
    flags: Sequence[str] = (),
) -> str:
    """least, most: verifiers. more: pools beside them. Returns what `specwire deploy` printed."""
    target = {
        "kind": "verify",
        "model": f"{MODEL}:delay_ms=250",
        "resources": {"big": 1},
        "min_replicas": least,
        "max_replicas": most,
        "options": {"slots": slots, "insecure": True, "grace": 0.5},
    }
    resources, options = {"small": 1}, {"insecure": True}
    draft = {"kind": "draft", "model": f"{MODEL}:agree=0.8", "resources": resources, "options": options}
    text = file_of(here, {"target": target, "draft": draft, **more}, {"count": orchestrators})
    return here.deploy(text, "--start-timeout", "60", *flags)


@contextmanager
def running(addresses: str | Sequence[str], prompt: Sequence[int] = PROMPT) -> Iterator[Stream]:
    """A session under way, at the first address to begin with; its text is looked at in the end."""
    with Stream(addresses, prompt, patience=LIMIT_S, max_tokens=LENGTH, model=NAME) as stream:
        stream.until_accepted()
        yield stream
    assert stream.tokens == plain(MODEL, len(stream.tokens), prompt)
