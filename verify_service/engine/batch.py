"""A step's batch: who takes part in it and with what, whose prompts are fed, and what the target says at its rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TypeVar

from specwire.core.law.acceptance import RowChoice, RowSampling
from specwire.core.law.sampling import TokenScore
from specwire.core.messages import DraftToken, SourceKind
from specwire.core.model import SlotModel, out_of_memory
from specwire.core.policy.costs import StepCosts
from specwire.core.policy.tunables import PREFILL_ROWS
from specwire.core.policy.windows import Share, StepCandidate, StepPlan, chain_widths, chunks
from verify_service.engine.sessions import Held, Roster
from verify_service.engine.shares import TenantShares, fair_rows

W = TypeVar("W")

# ----------------------------------------------------------------------------------------------------------------------
# Each session's part of a step, and what the target says at its rows.


class Part(NamedTuple):
    """A session's `share` of a step.

    tokens: of the window. source: of the chain that they come from, if any. wanted: rows of logits: one more than the
    window, none before the prompt's end.
    """

    share: Share
    held: Held
    window: tuple[DraftToken, ...]
    tokens: tuple[int, ...]
    source: int | None
    wanted: int

    @classmethod
    def of(cls, share: Share, held: Held) -> Part:
        session = held.session
        if not share.window:
            return cls(share, held, (), (), None, 1 if share.decides else 0)
        source: int | None = None
        if share.kind is SourceKind.DRAFTER:
            path = session.best
            window, source = path.drafts(session.width(path, share.window)), path.source
        else:
            window = tuple(map(DraftToken, session.window(share.window, share.kind)))
        window = session.foreseen(window)
        tokens = tuple([draft.token for draft in window])
        return cls(share, held, window, tokens, source, len(window) + 1 if share.decides else 0)

    def rows(self) -> list[RowSampling]:
        """How the token of each row is chosen, as if the window's tokens before it had been decided."""
        session, window = self.held.session, self.tokens
        start = session.position
        if session.plain:
            return [RowSampling(start + index, session.sampling) for index in range(self.wanted)]
        if not self.wanted:
            return []
        allowed = session.allowed(window)
        return [
            RowSampling(
                start + index,
                session.sampling_behind(window[:index]),
                session.seen(window[:index]),
                session.ending.banned(start + index),
                allowed[index],
            )
            for index in range(self.wanted)
        ]


class RowSampler(Protocol):
    """Reads the rows of one runtime's forwards; of tensors: `specwire.lm.law.sampler.LogitsSampler`."""

    def choose(self, rows: Any, parts: Sequence[Part], heard: Callable[[Part], bool]) -> list[RowChoice]:
        """The target's choices for each part; the parts' rows stand one behind the other.

        heard: whether a part's constraint has answered; a part whose constraint has not gets no choices. What fails for
        one part is told as its `failure`.
        """
        ...

    def score(self, rows: Any, tokens: Sequence[int], top: int) -> list[TokenScore]:
        """Each token in its row, with the `top` most probable ids there."""
        ...


# ----------------------------------------------------------------------------------------------------------------------
# What a step does when memory is short: smaller forwards are tried before a session is given up.

# Chunks of a prompt that are not cut any smaller.
LEAST_CHUNK = 32
OUT_OF_MEMORY_MESSAGE = "the target's forward ran out of memory"


class ShortOfMemory(Exception):
    """A forward lacked memory and has decided nothing."""


@contextmanager
def detect_out_of_memory() -> Iterator[None]:
    """Turns an allocator's failure within it into ShortOfMemory, whatever the runtime raises."""
    try:
        yield
    except Exception as error:
        if out_of_memory(error):
            raise ShortOfMemory(str(error)) from error
        raise


class StepLimits:
    """The largest forward. It shrinks for good once memory ran out: free memory does not grow.

    prefill_rows: tokens of waiting prompts. most_rows: of all sessions together; only draft tokens are cut to it.
    """

    def __init__(self) -> None:
        self.prefill_rows = PREFILL_ROWS
        self.most_rows = math.inf

    def lower(self, shares: Sequence[Share]) -> bool:
        """A forward of `shares` was too large; returns whether the next one will be smaller."""
        widest, windows = max(share.fresh for share in shares), sum(share.window for share in shares)
        if widest > LEAST_CHUNK:
            self.prefill_rows = max(LEAST_CHUNK, min(widest, self.prefill_rows) // 2)
        elif windows:
            self.most_rows = sum(share.rows for share in shares) - (windows + 1) // 2
        return widest > LEAST_CHUNK or windows > 0


# ----------------------------------------------------------------------------------------------------------------------
# Whose prompt is fed first where several wait: tenants share a step's prefill.


class PromptTurns:
    """The tenant that was fed least while others' prompts waited goes first.

    Among its prompts the most urgent goes first, then the one that came first. No tenant gets ahead of another by
    claiming to be urgent, as in `specwire.core.placement`. Start-time fair queueing (Goyal, Vin, Cheng 1996): a new
    tenant begins where the least served one is.

    An orchestrator's tenants are scopes here. Where the verifier has tenants of its own (`Held.tenant`), they take
    turns by weight, and the scopes of each within its turns.
    """

    def __init__(self, weight: Callable[[str], float] = lambda _: 1.0) -> None:
        # Tokens fed to scopes that wait; the same for tenants that wait, divided by their weight.
        self._fed: dict[bytes, float] = {}
        self._fed_of: dict[str, float] = {}
        self._weight = weight

    def ordered(self, candidates: Sequence[StepCandidate], held: Mapping[int, Held]) -> Sequence[StepCandidate]:
        """Shares without a prompt first, as they are; then prompts in turn. held: sessions by slot."""
        prompts = [held[each.slot] for each in candidates if each.uncached > 1]
        if not prompts:
            self._fed.clear()
            self._fed_of.clear()
            return candidates
        came_us: dict[bytes, float] = {}
        for each in prompts:
            came_us[each.scope] = min(each.came_us, came_us.get(each.scope, each.came_us))
        self._fed = _joined(self._fed, came_us)
        self._fed_of = _joined(self._fed_of, {each.tenant for each in prompts})

        def turn(candidate: StepCandidate) -> tuple[float, str, float, float, bytes, int, float]:
            if candidate.uncached == 1:
                return -1.0, "", 0.0, 0.0, b"", 0, 0.0
            own = held[candidate.slot]
            fed, came = self._fed[own.scope], came_us[own.scope]
            return self._fed_of[own.tenant], own.tenant, fed, came, own.scope, -own.priority, own.came_us

        return sorted(candidates, key=turn)

    def took(self, parts: Sequence[Part]) -> None:
        """A step fed these."""
        for part in parts if self._fed else ():
            share, held = part.share, part.held
            if share.fresh > 1 or not share.decides:
                if held.scope in self._fed:
                    self._fed[held.scope] += share.fresh
                if held.tenant in self._fed_of:
                    self._fed_of[held.tenant] += share.fresh / self._weight(held.tenant)


def _joined(fed: Mapping[W, float], waiting: Iterable[W]) -> dict[W, float]:
    """Tokens fed to those that wait. A new one begins where the least served one is."""
    present = set(waiting)
    least = min((tokens for whose, tokens in fed.items() if whose in present), default=0.0)
    return {whose: fed.get(whose, least) for whose in present}


# ----------------------------------------------------------------------------------------------------------------------
# Which sessions take part in a step, where tenants share a verifier (`verify_service.engine.shares`).


class StepSharing:
    """Sessions that are left out of a step are charged for none of its time.

    `next_us`: when one of those may go on that wait for their tenant's tokens per second; infinite if none does.
    """

    def __init__(
        self, shares: TenantShares, costs: StepCosts, roster: Roster, lm: SlotModel, now_us: Callable[[], float]
    ) -> None:
        self.shares = shares
        self._roster = roster
        self._lm = lm
        self._position_bytes = lm.kv_bytes // (lm.slots * lm.info.context)
        self._costs = costs
        self.next_us = math.inf
        self._now_us = now_us
        self._steps = 0
        self._left_out: list[Held] = []
        self._looked_us = now_us()
        # Tenants that want something of this step.
        self._active: frozenset[str] = frozenset()
        # First tokens that prompts decided, which their tenants have had beside their rows.
        self._firsts: Counter[str] = Counter()

    def able(self, ready: Sequence[Held], lent: Sequence[tuple[str, int]] = ()) -> list[Held]:
        """Those whose tenants' tokens per second allow it. lent: tenants and slots of texts that are scored."""
        now_us = self._now_us()
        passed_us, self._looked_us = now_us - self._looked_us, now_us
        for held in self._left_out:
            held.running.since_us = min(now_us, held.running.since_us + passed_us)
        for tenant, slot in (*((held.tenant, held.slot) for held in self._roster if not held.waiting), *lent):
            self.shares.count_held(tenant, self._lm.cached(slot) * self._position_bytes, passed_us)
        at_us = {tenant: self.shares.decides_us(tenant, now_us) for tenant in {held.tenant for held in ready}}
        self.next_us = min((at for at in at_us.values() if at > now_us), default=math.inf)
        self._left_out = [held for held in ready if at_us[held.tenant] > now_us]
        return [held for held in ready if at_us[held.tenant] <= now_us]

    def chosen(
        self, shown: Sequence[StepCandidate], held: Mapping[int, Held], scoring: Iterable[str] = ()
    ) -> list[StepCandidate]:
        """The candidates that take part. A tenant's sessions that have waited for most steps go first.

        held: sessions by slot. scoring: tenants that have texts to score.
        """
        self._active = frozenset([*(held[each.slot].tenant for each in shown), *scoring])
        decoding = [each for each in shown if each.uncached == 1]
        able = Counter(held[each.slot].tenant for each in decoding)
        demand = {tenant: min(sessions, self._limit(tenant) or sessions) for tenant, sessions in able.items()}
        rows = fair_rows(demand, self.shares.weight, self._costs.plain)
        left = Counter({tenant: self._less_firsts(tenant, rows[tenant], demand[tenant]) for tenant in rows})
        taken: list[StepCandidate] = []
        for each in sorted(decoding, key=lambda each: (held[each.slot].served, held[each.slot].came_us)):
            tenant = held[each.slot].tenant
            if left[tenant] > 0:
                left[tenant] -= 1
                most = self._limit(tenant)
                taken.append(each if most is None else each._replace(room=min(each.room, most // rows[tenant])))
        taken += [each for each in shown if each.uncached > 1 and self._feeds(held[each.slot].tenant, demand)]
        present = {each.slot for each in taken}
        self._left_out += [held[each.slot] for each in shown if each.slot not in present]
        return taken

    def _less_firsts(self, tenant: str, rows: int, demand: int) -> int:
        """Its rows of this step, less the first tokens that its prompts decided: who opens much gets no more for that.

        A tenant that may have all that it wants has taken nothing from anybody.
        """
        if rows == demand:
            self._firsts[tenant] = 0
            return rows
        paid = min(self._firsts[tenant], rows - 1)
        self._firsts[tenant] -= paid
        return rows - paid

    def _limit(self, tenant: str) -> int | None:
        """Rows of a step, at least 1."""
        return self.shares.of(tenant).rows

    def _feeds(self, tenant: str, decoding: Mapping[str, int]) -> bool:
        if not self.paced(tenant):
            return False
        return self.shares.owed_us(tenant) <= 0 or not any(other != tenant for other in decoding)

    def paced(self, tenant: str) -> bool:
        """Whether its prompt tokens per second allow it to feed some now."""
        now_us = self._now_us()
        at_us = self.shares.feeds_us(tenant, now_us)
        if at_us > now_us:
            self.next_us = min(self.next_us, at_us)
        return at_us <= now_us

    def scored(self, tenant: str, tokens: int, elapsed_us: float) -> None:
        """Account for a chunk of a text that was scored, as for one of a prompt."""
        self.shares.fed({tenant: tokens}, elapsed_us, elapsed_us, self._active)

    def waits(self, tenant: str) -> bool:
        """Whether what it has to score waits, because others' share comes first."""
        return self.shares.owed_us(tenant) > 0 and bool(self._active - {tenant})

    def took(self, parts: Sequence[Part], forward_us: float) -> None:
        """Account for a step."""
        self._steps += 1
        fed: Counter[str] = Counter()
        decoding = rows = 0
        for part in parts:
            part.held.served = self._steps
            if part.share.fresh > 1 or not part.share.decides:
                fed[part.held.tenant] += part.share.fresh
                known = self._firsts[part.held.tenant]
                self._firsts[part.held.tenant] = min(known + part.share.decides, self._lm.slots)
            else:
                decoding, rows = decoding + 1, rows + part.share.rows
                self.shares.count_rows(part.held.tenant, part.share.rows)
        without_us = self._costs.of(decoding)(rows) if fed and decoding else 0.0
        extra_us = max(0.0, forward_us - without_us)
        self.shares.fed(fed, extra_us, forward_us, self._active)


# ----------------------------------------------------------------------------------------------------------------------
# A verifier for measurements, which stands for textbook speculation, and for streaming with one that waits.

# How long it waits for tokens that are due.
PATIENCE_US = 5e6


def patiently(
    candidates: Sequence[StepCandidate], now_us: float, prefill_rows: int = PREFILL_ROWS, waited_us: float = 0.0
) -> StepPlan:
    """Wait for everything that is due and test all of it, whatever it costs, without a ledger; instead of `schedule`.

    waited_us: time since the last step, because patience ends, too.
    """
    decoding = [each for each in candidates if each.uncached == 1]
    if any(each.missing > 0 for each in decoding) and waited_us < PATIENCE_US:
        return StepPlan((), now_us + PATIENCE_US - waited_us, tuple([each.slot for each in decoding]))
    shares = [Share(each.slot, 1, max(chain_widths(each), default=0), True) for each in decoding]
    return StepPlan((*shares, *chunks(candidates, prefill_rows)))
