"""What the tests of a Ray cluster share: a deployment of scripted models, and sessions whose text must be plain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from bench.cluster.site import Site
from tests.faults.streams import PROMPT, Stream, plain

LIMIT_S = 120.0
NAME, MODEL = "scripted:7", "scripted:7:vocab=64"
OTHER_NAME, OTHER_MODEL = "scripted:8", "scripted:8:vocab=64"
# More than there is time for: a session that ends by itself would not have been moved.
LENGTH = 4000
# A text goes on: so many tokens.
MORE = 10
FILE = """
redis: redis://{redis}/0
pools:
  target:
    kind: verify
    model: "scripted:7:vocab=64:delay_ms=250"
    resources: {{big: 1}}
    num_cpus: 0.1
    min_replicas: {least}
    max_replicas: {most}
    options: {{slots: {slots}, insecure: true, grace: 0.5}}
  draft:
    kind: draft
    model: "scripted:7:vocab=64:agree=0.8"
    resources: {{small: 1}}
    num_cpus: 0.1
    options: {{insecure: true}}
{more}
orchestrators:
  count: {orchestrators}
  num_cpus: 0.1
  resources: {{front: 1}}
  options: {{insecure: true}}
"""
OTHER = """\
  other:
    kind: verify
    model: "scripted:8:vocab=64"
    resources: {big: 1}
    num_cpus: 0.1
    options: {insecure: true, grace: 0.5}
"""


def deploy(
    here: Site,
    least: int,
    most: int,
    orchestrators: int = 1,
    slots: int = 8,
    more: str = "",
    flags: Sequence[str] = (),
) -> str:
    """least, most: verifiers. more: pools beside them. Returns what `specwire deploy` printed."""
    text = FILE.format(redis=here.redis, least=least, most=most, slots=slots, more=more, orchestrators=orchestrators)
    return here.deploy(text, "--start-timeout", "60", *flags)


@contextmanager
def running(addresses: str | Sequence[str], prompt: Sequence[int] = PROMPT) -> Iterator[Stream]:
    """A session under way, at the first address to begin with; its text is looked at in the end."""
    with Stream(addresses, prompt, patience=LIMIT_S, max_tokens=LENGTH, model=NAME) as stream:
        stream.until_accepted()
        yield stream
    assert stream.tokens == plain(MODEL, len(stream.tokens), prompt)
