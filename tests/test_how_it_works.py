"""One token's way, as docs/HOW_IT_WORKS.md has it, is the way that the code takes."""

from __future__ import annotations

import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType

from specwire.client import Chunk, Completion
from tests.orchestrator.redis_for_tests import RedisServer
from tests.orchestrator.stack import DRAFT, PROMPT, SLOW_TARGET, TARGET, TURNS, drafted, stack

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "HOW_IT_WORKS.md").read_text()
ROW = re.compile(r"^\| (\d+) \| `([\w/]+\.py)` \| `([\w.]+)` \| .+ \|$", re.MULTILINE)
MOST_FILES = 9
ENTERED = re.compile(r"enters\s+(\d+)\s+files,\s+(\d+)\s+functions,\s+([\d,]+)\s+lines")
PRODUCT = ("specwire", "draft_service", "verify_service", "orchestrator", "deploy")
# Its forward outlasts a round of messages on a busy machine, too, so that drafts come for every second verdict.
LEISURELY_TARGET = f"{TARGET}:delay_ms=60"
# What only requests with references have a use for.
NOT_ASKED_FOR = {"specwire/core/verify/references.py"}
Step = tuple[str, str]


def steps() -> list[Step]:
    """The table's files and functions, in its order."""
    return [(file, function) for _, file, function in ROW.findall(PAGE)]


@contextmanager
def recorded(wanted: set[Step]) -> Iterator[list[Step]]:
    """Which of these functions were entered, in this order, in threads that were started meanwhile and in this one."""
    names = {(str(ROOT / file), function): (file, function) for file, function in wanted}
    found: list[Step] = []

    def enter(code: CodeType) -> None:
        step = names.get((code.co_filename, code.co_qualname))
        if step is not None:
            found.append(step)

    with traced(enter):
        yield found


@contextmanager
def traced(enter: Callable[[CodeType], None]) -> Iterator[None]:
    """`enter` is called with each Python function that this thread, or one started meanwhile, enters."""

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            enter(frame.f_code)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


class SteadyWay:
    """What is entered between the 100th and the 300th token of a completion: neither its begin, nor its end."""

    def __init__(self) -> None:
        self.steady = False
        self._calls: Counter[CodeType] = Counter()

    def enter(self, code: CodeType) -> None:
        if self.steady:
            self._calls[code] += 1

    def functions(self) -> list[CodeType]:
        """The product's own that are entered for every second verdict or more often, which timers are not."""
        rooms = tuple(f"{ROOT / room}/" for room in PRODUCT)
        own = [code for code in self._calls if code.co_filename.startswith(rooms)]
        verdicts = next(self._calls[code] for code in own if code.co_qualname == "VerifySession.resolve")
        return [code for code in own if self._calls[code] >= verdicts / 2]

    def figures(self) -> tuple[int, int, int]:
        """Files, functions, lines of code in these functions."""
        functions = self.functions()
        lines = {(code.co_filename, line) for code in functions for *_, line in code.co_lines() if line}
        return len(self.files()), len(functions), len(lines)

    def files(self) -> set[str]:
        return {str(Path(code.co_filename).relative_to(ROOT)) for code in self.functions()}


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
        async with stack(SLOW_TARGET, DRAFT, redis_url=redis.url, plan=TURNS, patient=True) as running:

            async def text() -> Completion:
                del entered[:]
                return await running.client.complete(list(PROMPT), max_tokens=48, ngram=False)

            await drafted(text)
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


async def test_a_steady_token_enters_no_more_than_the_page_says() -> None:
    stated = ENTERED.search(PAGE)
    assert stated is not None
    way = SteadyWay()
    with RedisServer() as redis, traced(way.enter):
        async with stack(LEISURELY_TARGET, DRAFT, redis_url=redis.url) as running:
            received = 0
            async for event in running.client.generate(list(PROMPT), max_tokens=400, ngram=False):
                received += len(event.tokens) if isinstance(event, Chunk) else 0
                way.steady = 100 < received < 300
    seen = dict(zip(("files", "functions", "lines"), way.figures(), strict=True))
    said = dict(zip(seen, (int(figure.replace(",", "")) for figure in stated.groups()), strict=True))
    # A twentieth: on a slow machine a timer may fire for every second verdict.
    assert all(0.95 * said[each] <= seen[each] <= 1.05 * said[each] for each in seen), (seen, said)
    assert not way.files() & NOT_ASKED_FOR
