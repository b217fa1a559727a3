"""A verifier is killed in the middle of constrained texts: they go on elsewhere as they would have; nothing is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from demo_pair import DRAFT, TARGET
from specwire.client import Chunk, Client, Completion
from specwire.client.events import PartialCompletion
from specwire.client.requests import RequestOptions
from specwire.core.law.constraint import Constraint, ConstraintKind
from specwire.core.messages import FinishReason
from tests.faults.parts import Parts, parts
from tests.text.schemas import fits
from tests.wait import asked_blocking, eventually

PROMPT = "def shape(self):\n    return "
REGEX = r"\{('[a-z]{3,12}': [0-9]{1,6}, ){25}'end': 0\}"
WISHES = (
    RequestOptions(regex=REGEX, max_tokens=500),
    RequestOptions(regex=REGEX, max_tokens=500, temperature=0.8, seed=5),
)
WORDS = ("--dtype", "float32", "--threads", "1", "--slots", "4", "--context", "768")
LIMIT_S = 60.0


@pytest.fixture
def owned() -> Iterator[Parts]:
    with parts() as owner:
        yield owner
        owner.end()
        # The processes that held constraints hear from the kernel that nobody is there.
        assert eventually(lambda: not owner.living())


def test_a_killed_verifier_changes_no_constrained_text(owned: Parts) -> None:
    verifiers = [owned.start("verify", str(TARGET), *WORDS) for _ in range(2)]
    drafter = owned.start("draft", str(DRAFT), *WORDS)
    for service in (*verifiers, drafter):
        service.ready()
    peers = [word for each in verifiers for word in ("--verifier", each.address)]
    door = owned.start("orchestrate", *peers, "--drafter", drafter.address)
    door.ready()
    with Client(door.address, patience=LIMIT_S) as client, ThreadPoolExecutor(len(WISHES)) as pool:
        whole = asked_blocking(
            lambda: list(pool.map(lambda wish: client.complete(PROMPT, **wish), WISHES)),
            lambda texts: any(each.stats.accepted for each in texts),
        )
        reading = [pool.submit(read, client, wish, verifiers[0].kill) for wish in WISHES]
        disturbed = [each.result(LIMIT_S) for each in reading]
    for one, other in zip(whole, disturbed, strict=True):
        assert one.finish_reason is FinishReason.EOS
        assert fits(Constraint(ConstraintKind.REGEX, (REGEX,)), one.text)
        assert (other.text, other.tokens) == (one.text, one.tokens)


def read(client: Client, wish: RequestOptions, hurt: Callable[[], None]) -> Completion:
    """The text; the verifier is killed once a third of it is there."""
    gathered, seen = PartialCompletion(), 0
    for event in client.generate(PROMPT, **wish):
        gathered.add(event)
        seen += len(event.tokens) if isinstance(event, Chunk) else 0
        if seen > 60:
            hurt()
    return gathered.completion()
