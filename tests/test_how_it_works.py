"""One token's way, as docs/HOW_IT_WORKS.md has it, is the way that the code takes."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from tests.orchestrator.redis_for_tests import RedisServer
from tests.orchestrator.stack import DRAFT, PROMPT, SLOW_TARGET, stack

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "HOW_IT_WORKS.md").read_text()
ROW = re.compile(r"^\| (\d+) \| `([\w/]+\.py)` \| `([\w.]+)` \| .+ \|$", re.MULTILINE)
MOST_FILES = 9
Step = tuple[str, str]


def steps() -> list[Step]:
    """The table's files and functions, in its order."""
    return [(file, function) for _, file, function in ROW.findall(PAGE)]


@contextmanager
def recorded(wanted: set[Step]) -> Iterator[list[Step]]:
    """Which of these functions were entered, in this order, in threads that were started meanwhile and in this one."""
    names = {(str(ROOT / file), function): (file, function) for file, function in wanted}
    found: list[Step] = []

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            step = names.get((frame.f_code.co_filename, frame.f_code.co_qualname))
            if step is not None:
                found.append(step)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def test_the_table_is_short_and_numbered() -> None:
    numbers = [int(number) for number, _, _ in ROW.findall(PAGE)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len({file for file, _ in steps()}) <= MOST_FILES
    assert (len(steps()), steps()[0][0]) == (MOST_FILES, "specwire/client/aio.py")


def not_followed(entered: list[Step], way: list[Step]) -> Step | None:
    """The first of `way` that was not entered behind all those before it; None where there is none."""
    rest = iter(entered)
    return next((step for step in way if step not in rest), None)  # `in` takes what it has looked at


async def test_a_completion_takes_this_way() -> None:
    with RedisServer() as redis, recorded(set(steps())) as entered:
        async with stack(SLOW_TARGET, DRAFT, redis_url=redis.url) as running:
            del entered[:]
            done = await running.client.complete(list(PROMPT), max_tokens=48, ngram=False)
    assert done.stats.accepted > 0
    assert not_followed(entered, steps()) is None


async def test_another_way_is_noticed() -> None:
    with recorded(set(steps())) as entered:
        async with stack(SLOW_TARGET) as running:
            del entered[:]
            await running.client.complete(list(PROMPT), max_tokens=2, drafting=False)
    assert not_followed(entered, steps()) == ("draft_service/sessions.py", "Sessions.step")
    assert not_followed(entered, [step for step in steps() if step[1] != "Sessions.step"]) == (
        "orchestrator/store/redis.py",
        "RedisStore.append",
    )
