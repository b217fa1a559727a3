"""A request on its way to be asked: behind which turn it stands, who asks, what is predicted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from specwire.client.requests import RequestOptions
from tests.simulation.asks import Ask
from tests.simulation.expected import Plain, Wish
from tests.simulation.facts import Facts
from tests.simulation.hearing import Heard

# Seconds between two looks whether the turn before is over.
LOOK = 0.1
# Of a prediction every so many-th token is wrong.
WRONG = 7


def tenant_name(number: int) -> str:
    return f"tenant-{number}"


def token_of(number: int) -> str:
    """What a tenant's clients show."""
    return f"token-of-tenant-{number}"


@dataclass
class Asking:
    """before: the turn that it follows. tenants: how many there are; a single one shows nothing."""

    ask: Ask
    facts: Facts
    tenants: int
    before: Heard | None = None

    @property
    def token(self) -> str:
        return token_of(self.ask.tenant) if self.tenants > 1 else ""

    def hearings(self) -> list[Heard]:
        tenant = tenant_name(self.ask.tenant) if self.tenants > 1 else ""
        return [Heard(self.ask, tenant, choice, self.ask.prompt) for choice in range(self.ask.n)]

    async def ready(self, hearings: Sequence[Heard]) -> bool:
        """Wait for the end of the turn before. Whether there is one to go on behind."""
        before = self.before
        if before is None:
            return True
        while not before.done:  # noqa: ASYNC110 # by the clock of the simulation
            await asyncio.sleep(LOOK)
        for heard in hearings:
            heard.prompt = (*before.prompt, *before.tokens, *self.ask.prompt)
            heard.unasked = before.end is None
        return before.end is not None

    def options(self) -> RequestOptions:
        parent = "" if self.before is None else self.before.session_id
        return self.ask.options(parent, self._prediction() if self.ask.predicted else ())

    def _prediction(self) -> list[int]:
        """What plain decoding says, with mistakes; where proposals have a say, the prompt again."""
        before = () if self.before is None else (*self.before.prompt, *self.before.tokens)
        prompt = (*before, *self.ask.prompt)
        known = self.facts.of(Wish(prompt, self.ask.sampling(), self.ask.stopping, self.ask.stop))
        right = known.raw[len(prompt) :] if isinstance(known, Plain) else prompt
        return [1 if index % WRONG == 0 else token for index, token in enumerate(right[: self.ask.predicted], 1)]
