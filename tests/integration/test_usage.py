"""What sessions used on two verifiers, one of which is killed: their tokens count once."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path
from urllib.request import urlopen

from specwire.client import AsyncClient, Chunk
from tests.integration.stack_process import running
from tests.ports import free_address
from tests.wait import LIMIT_S, until
from verify_service.usage import read_records, totals

SLOW = "scripted:7:delay_ms=25"
PROMPT, TOKENS, KILLED_AT = [1, 2, 3], 200, 40
PLACE = ("--listen", "127.0.0.1:0", "--json")


async def read(client: AsyncClient, text: list[int]) -> None:
    async for event in client.generate(PROMPT, max_tokens=TOKENS):
        if isinstance(event, Chunk):
            text += event.tokens


def says(figures: str, what: bytes) -> bool:
    with urlopen(f"http://{figures}/metrics", timeout=LIMIT_S) as page:
        return what in page.read()


def linked(figures: str) -> bool:
    """Whether a verifier has the orchestrator's link. One that has none yet gets no session."""
    return says(figures, b'specwire:links_up{service="verifier"} 1')


def serves(figures: str) -> bool:
    return not says(figures, b'specwire:sessions{service="verifier",state="served"} 0')


async def test_a_killed_verifier_loses_no_token_that_another_goes_on_behind(tmp_path: Path) -> None:
    files = [tmp_path / "one", tmp_path / "two"]
    with ExitStack() as owned:
        figures = [free_address() for _ in files]
        verifiers = [
            owned.enter_context(running("verify", SLOW, "--usage-log", str(file), "--metrics", address, *PLACE))
            for file, address in zip(files, figures, strict=True)
        ]
        addresses = [verifier.ready()["address"] for verifier in verifiers]
        both = (word for address in addresses for word in ("--verifier", address))
        orchestrator = owned.enter_context(running("orchestrate", *both, "--plan", "off", *PLACE))
        async with AsyncClient(orchestrator.ready()["address"]) as client, asyncio.timeout(LIMIT_S):
            await until(lambda: all(map(linked, figures)))
            first: list[int] = []
            second: list[int] = []
            async with asyncio.TaskGroup() as texts:
                texts.create_task(read(client, first))
                await until(lambda: first)
                texts.create_task(read(client, second))  # on the other one, unless its link was slow
                await until(lambda: min(len(first), len(second)) >= KILLED_AT)
                killed = next(at for at, address in enumerate(figures) if serves(address))
                verifiers[killed].process.kill()
        other = verifiers[1 - killed]
        other.process.terminate()
        assert other.wait() == 0, other.said()
    assert (len(first), len(second)) == (TOKENS, TOKENS)
    found = [record for file in files if file.exists() for record in read_records(file)]
    known = [record for record in found if record is not None]
    assert max(record.start for record in known) > len(PROMPT)  # one has moved
    (usage,) = totals(known).values()
    assert (usage.sessions, usage.prompt_tokens, usage.decided) == (2, 2 * len(PROMPT), 2 * TOKENS)
