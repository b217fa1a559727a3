"""A scenario's faults, and how they are undone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from tests.simulation.clock import VirtualTime
from tests.simulation.loop import SimLoop
from tests.simulation.network import DETECTION, Line, Network
from tests.simulation.parties import Party, VerifierParty
from tests.simulation.scenario import HOST_FAULTS, LINE_FAULTS, PARTY_FAULTS, Fault
from tests.simulation.store import SimStore

SLOWNESS = 6.0
LOSSES = 0.3
OUTAGE = 0.3
# Seconds of the log that a replica lacks when it takes over.
LAG = 0.4


class Faults:
    """Puts a scenario's faults on the clock; each ends after its time."""

    def __init__(
        self,
        loop: SimLoop,
        network: Network,
        store: SimStore,
        clock: VirtualTime,
        parties: Mapping[str, Party],
        random: Random,
        vocabulary: int,
    ) -> None:
        self._loop = loop
        self._network = network
        self._store = store
        self._clock = clock
        self._parties = parties
        self._random = random
        self._vocabulary = vocabulary
        self._timers: list[asyncio.TimerHandle] = []

    def plan(self, fault: Fault) -> None:
        self._timers.append(self._loop.call_at(fault.start, self._begin, fault))

    def end(self) -> None:
        """No more faults; parties that are down stay so."""
        for timer in self._timers:
            timer.cancel()
        for party in self._parties.values():
            party.resume()
        for line in self._network.lines.values():
            line.stalled_until = line.closed_until = 0.0
            line.mangle = untouched
        self._store.recover()

    def _begin(self, fault: Fault) -> None:
        act = getattr(self, f"_{fault.kind}")
        if fault.kind in PARTY_FAULTS:
            act(self._parties[fault.target], fault.seconds)
        elif fault.kind in HOST_FAULTS:
            act(self._parties[fault.target], fault)
        elif fault.kind in LINE_FAULTS:
            act(self._line(fault.target), fault.seconds)
        else:
            act(fault.to or fault.seconds)

    def _line(self, target: str) -> Line:
        one, other = target.split("-")[:2], target.split("-")[2:]
        return self._network.line("-".join(one), "-".join(other))

    def _after(self, seconds: float, action: Callable[..., None], *args: Any) -> None:
        self._timers.append(self._loop.call_later(seconds, action, *args))

    # Parties

    def _crash(self, party: Party, seconds: float) -> None:
        party.crash()
        self._after(seconds, party.start)

    def _pause(self, party: Party, seconds: float) -> None:
        party.pause()
        self._after(seconds, party.resume)

    def _slow(self, party: Party, seconds: float) -> None:
        party.slow(SLOWNESS)
        self._after(seconds, party.slow, 1.0)

    def _stop(self, party: Party, seconds: float) -> None:
        party.stop()
        self._after(max(party.exits_within, seconds), self._start_again, party)

    def _start_again(self, party: Party) -> None:
        party.crash()
        party.start()

    def _clock_set(self, party: Party, fault: Fault) -> None:
        """Its host's clock is wrong by so much from then on."""
        self._clock.off[party.name] = fault.seconds

    def _log_cut(self, party: Party, fault: Fault) -> None:
        """It does not reach the log, others do."""
        self._store.cut_until[party.name] = self._loop.time() + fault.seconds

    def _update(self, party: Party, fault: Fault) -> None:
        """A verifier is stopped, and comes back with another configuration of the same weights."""
        assert isinstance(party, VerifierParty)
        party.config = fault.to
        self._stop(party, fault.seconds)

    def _swap(self, party: Party, fault: Fault) -> None:
        """Likewise, and it is killed."""
        assert isinstance(party, VerifierParty)
        party.config = fault.to
        self._crash(party, fault.seconds)

    # Lines

    def _cut(self, line: Line, _: float) -> None:
        self._network.reset(line, slow=False)

    def _break(self, line: Line, _: float) -> None:
        self._network.reset(line, slow=True)

    def _stall(self, line: Line, seconds: float) -> None:
        line.stalled_until = self._loop.time() + seconds
        if seconds > DETECTION:
            self._after(DETECTION, self._network.reset, line, False)

    def _late(self, line: Line, seconds: float) -> None:
        """What clients say on the connections of now arrives late, and after they have given these up."""
        for call in list(line.calls):
            call.hold(self._loop.time() + seconds)
            call.lose(self._random.uniform(0.0, seconds), seconds + 0.1)

    def _close(self, line: Line, seconds: float) -> None:
        line.closed_until = self._loop.time() + seconds
        self._network.reset(line, slow=False)

    def _mangle(self, line: Line, seconds: float) -> None:
        line.mangle = Mangler(self._random, self._vocabulary)
        self._after(seconds, self._mend, line)

    def _mend(self, line: Line) -> None:
        line.mangle = untouched

    # The log

    def _log_down(self, seconds: float) -> None:
        self._store.fail(seconds)

    def _log_clock_set(self, seconds: float) -> None:
        self._store.off = seconds

    def _log_full(self, seconds: float) -> None:
        self._store.full_until = self._loop.time() + seconds

    def _effects_late(self, seconds: float) -> None:
        self._store.effect_late = LOSSES
        self._after(seconds, setattr, self._store, "effect_late", 0.0)

    def _log_failover(self, seconds: float) -> None:
        """A replica takes over, which lacks the latest writes; its clock is wrong by so much."""
        self._store.save()
        self._after(LAG, self._fail_over, seconds)

    def _fail_over(self, seconds: float) -> None:
        self._store.off = seconds
        self._lose_log("saved")

    def _log_damaged(self, key: str) -> None:
        """Of a running session's log a key is lost, or its record makes no sense."""
        running = self._store.running
        if running:
            self._store.damage(self._random.choice(running), key)

    def _log_slow(self, seconds: float) -> None:
        usual, self._store.delay = self._store.delay, (0.05, 0.3)
        self._after(seconds, setattr, self._store, "delay", usual)

    def _acks_lost(self, seconds: float) -> None:
        self._store.ack_lost = LOSSES
        self._after(seconds, setattr, self._store, "ack_lost", 0.0)

    def _effects_lost(self, seconds: float) -> None:
        self._store.effect_lost = LOSSES
        self._after(seconds, setattr, self._store, "effect_lost", 0.0)

    def _log_restarted(self, _: float) -> None:
        self._log_down(OUTAGE)
        self._store.restart("all")

    def _log_behind(self, seconds: float) -> None:
        """Its state of now comes back then."""
        self._store.save()
        self._after(min(seconds, 1.0), self._lose_log, "saved")

    def _log_emptied(self, _: float) -> None:
        self._lose_log("nothing")

    def _lose_log(self, kept: str) -> None:
        self._log_down(OUTAGE)
        self._store.restart(kept)


def untouched(message: Any) -> Any:
    return message


class Mangler:
    """Loses, repeats, reorders and falsifies proposals, which are hints; leaves everything else alone."""

    def __init__(self, random: Random, vocabulary: int) -> None:
        self._random = random
        self._vocabulary = vocabulary

    def __call__(self, message: Any) -> Any:
        fields = message.DESCRIPTOR.fields_by_name
        if "proposals" in fields:
            self._mangle(message)
        elif "said" in fields and message.HasField("said"):
            self._mangle(message.said)
        return message

    def _mangle(self, message: Any) -> None:
        proposals, random = list(message.proposals), self._random
        kept = [p for p in proposals for _ in range(random.choice((0, 1, 1, 1, 2)))]
        random.shuffle(kept)
        del message.proposals[:]
        for proposal in kept:
            message.proposals.append(proposal)
            if random.random() < 0.3:
                self._falsify(message.proposals[-1])

    def _falsify(self, proposal: Any) -> None:
        random = self._random
        match random.randrange(4):
            case 0:
                proposal.tokens[:] = [random.randrange(self._vocabulary + 1) for _ in proposal.tokens]
            case 1:
                proposal.offset += random.randrange(3)
            case 2:
                proposal.base = max(0, proposal.base - random.randrange(3))
            case 3:
                proposal.chain += random.randrange(3)
