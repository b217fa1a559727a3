"""Scenarios in which a mistake of `mistakes.py` can show: among the random ones, or made for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.simulation.requests import SimRequest
from tests.simulation.scenario import Fault, Scenario


def has(*kinds: str) -> Callable[[Scenario], bool]:
    return lambda scenario: any(fault.kind in kinds for fault in scenario.faults)


def always(_: Scenario) -> bool:
    return True


def late_openings(seed: int) -> Scenario:
    """Sessions open while what is said to the verifier arrives late; they open again on the next connection."""
    requests = (SimRequest(0.3, 0, (3, 4), 60, request_id="a"), SimRequest(0.32, 0, (3, 5), 60))
    faults = (Fault(0.28, "late", "orchestrator-0-verifier-0", 0.4),)
    return Scenario(seed, forward=0.05, delay=(0.0002, 0.02), requests=requests, faults=faults)


def away_and_back(seed: int) -> Scenario:
    """A session moves to the other verifier, and back to the first one, which still has it as it was."""
    requests = tuple(SimRequest(0.1, 0, (number + 1, 4), 80, request_id=f"{number}") for number in range(3))
    faults = (
        Fault(0.6, "close", "orchestrator-0-verifier-0", 3.0),
        Fault(4.2, "close", "orchestrator-0-verifier-1", 20.0),
    )
    return Scenario(seed, verifiers=2, forward=0.1, requests=requests, faults=faults)


def taken_over(seed: int) -> Scenario:
    """Clients lose their connections to an orchestrator that goes on, and turn to the other one."""
    requests = tuple(
        SimRequest(0.5, 0, (number + 1, 4), 100, request_id=f"{number}", library=number > 1) for number in range(3)
    )
    faults = (Fault(0.9, "cut", "orchestrator-0-client"), Fault(2.4, "cut", "orchestrator-1-client"))
    return Scenario(seed, orchestrators=2, forward=0.1, delay=(0.0002, 0.02), requests=requests, faults=faults)


def links_cut_and_a_slow_log(seed: int) -> Scenario:
    """Much is decided that is not durable when the links are cut."""
    requests = tuple(SimRequest(0.5, 0, (number + 1, 4), 100, request_id=f"{number}") for number in range(3))
    cuts = tuple(Fault(0.7 + number / 10, "cut", "orchestrator-0-verifier-0") for number in range(5))
    return Scenario(seed, agree=1.0, requests=requests, faults=(Fault(0.5, "log_slow", "", 3.0), *cuts))


def short_and_well_drafted(seed: int) -> Scenario:
    requests = tuple(SimRequest(0.5, 0, (number + 1, seed % 9 + 1), 7 + number) for number in range(3))
    return Scenario(seed, agree=1.0, plan="stream:4,8", forward=0.05, requests=requests)


def branching(seed: int) -> Scenario:
    """A drafter that is often wrong, and has what is right among its candidates."""
    requests = tuple(
        SimRequest(0.5, 0, (number + 1, seed % 9 + 1), 24, float(number), seed=seed, drafting=1) for number in range(3)
    )
    return Scenario(
        seed, agree=0.6, plan="auto:4", forward=0.05, draft=0.002, delay=(0.02, 0.04), spread=4.0, requests=requests
    )


def headed(seed: int, head: str = "good", rule: str = "") -> Scenario:
    """A verifier with a head, and nobody else who drafts."""
    requests = tuple(
        SimRequest(0.5, 0, (number + 1, seed % 9 + 1), 40, float(rule != ""), seed=seed, rule=rule)
        for number in range(3)
    )
    return Scenario(seed, drafters=0, heads=(head,), requests=requests)


def frail_heads(seed: int) -> Scenario:
    return headed(seed, "frail")


def poor_heads(seed: int) -> Scenario:
    return headed(seed, "poor")


def headed_and_weighed(seed: int) -> Scenario:
    return headed(seed, rule="rejection")


def left_behind(seed: int) -> Scenario:
    """Sessions whose clients have gone wait for the log when their orchestrator stops."""
    requests = tuple(
        SimRequest(0.5, 0, (number + 1, 4), 100, request_id=f"{number}", leave_after=0) for number in range(3)
    )
    lasting = SimRequest(0.5, 0, (5, 5), 100, request_id="lasting", timeout=1.0)
    faults = (Fault(0.53, "log_down", "", 10.0), Fault(0.6, "stop", "orchestrator-0", 1.0))
    return Scenario(seed, forward=0.05, grace=0.0, requests=(*requests, lasting), faults=faults)


def drafted(scenario: Scenario) -> bool:
    return scenario.drafters + scenario.dialling > 0


LINK_LOST = has("cut", "break", "close", "late", "pause", "crash")


# Of several tenants, turns, completions and options


SHARED = tuple(1 + index % 9 for index in range(12))


def two_tenants(seed: int) -> Scenario:
    """They ask for the same under one request id; the second one then goes on behind the first one's session."""
    requests = (
        SimRequest(0.5, 0, (*SHARED, 1), 20, request_id="a"),
        SimRequest(1.5, 0, (*SHARED, 1), 20, request_id="a", tenant=1),
        SimRequest(2.5, 0, (4,), 8, follows=0, tenant=1),
    )
    return Scenario(seed, tenants=2, requests=requests)


def two_bodies(seed: int) -> Scenario:
    requests = (SimRequest(0.5, 0, (3, 4), 30, request_id="a"), SimRequest(0.6, 0, (3, 5), 30, request_id="a"))
    return Scenario(seed, forward=0.05, requests=requests)


def next_turns(seed: int) -> Scenario:
    requests = (
        SimRequest(0.5, 0, (*SHARED, 1), 20),
        SimRequest(0.5, 0, (4, 2), 20, follows=0),
        SimRequest(0.5, 0, (5,), 20, follows=1),
    )
    return Scenario(seed, requests=requests)


def several_completions(seed: int) -> Scenario:
    return Scenario(seed, requests=(SimRequest(0.5, 0, (*SHARED, 1), 20, temperature=1.0, seed=seed, n=3),))


def shared_prompts(seed: int) -> Scenario:
    requests = tuple(SimRequest(0.5 + number / 2, 0, (*SHARED, number + 1, 4), 10) for number in range(4))
    return Scenario(seed, requests=requests)


def a_queue(seed: int) -> Scenario:
    """More sessions than slots, urgent ones last."""
    requests = tuple(
        SimRequest(0.5 + number / 100, 0, (number + 1, 4), 12, priority=(number - 2) % 4) for number in range(5)
    )
    return Scenario(seed, slots=1, queue=8, queue_wait=30.0, forward=0.05, requests=requests)


def links_cut(seed: int, **options: Any) -> Scenario:
    """Sessions move between verifiers, which know them or not."""
    requests = tuple(SimRequest(0.5, 0, (number + 1, 4), 60, request_id=f"{number}", **options) for number in range(3))
    cut = Fault(1.5, "close", "orchestrator-0-verifier-0", 30.0)
    return Scenario(seed, verifiers=2, forward=0.05, requests=requests, faults=(cut,))


def moved_between_heads(seed: int, heads: tuple[str, str]) -> Scenario:
    """One verifier is cut off, then the other."""
    moved = away_and_back(seed)
    requests = tuple(replace(request, max_tokens=140) for request in moved.requests)
    return replace(moved, drafters=0, heads=heads, requests=requests)


def penalised_and_moved(seed: int) -> Scenario:
    return links_cut(seed, repetition_penalty=1.5, presence_penalty=1.0)


def not_to_end_early(seed: int) -> Scenario:
    return links_cut(seed, stop_ids=(3, 4), min_tokens=40)


def reported_and_taken_over(seed: int) -> Scenario:
    requests = tuple(replace(request, logprobs=2) for request in taken_over(seed).requests)
    return replace(taken_over(seed), requests=requests)


def stopped_by_strings_and_taken_over(seed: int) -> Scenario:
    """Each token's end is withheld until the next one."""
    requests = tuple(
        replace(request, stop=tuple(f"{digit} 0" for digit in range(10))) for request in taken_over(seed).requests
    )
    return replace(taken_over(seed), requests=requests)


def weighed_and_badly_drafted(seed: int) -> Scenario:
    """Most of what is drafted is what the target never says."""
    requests = tuple(
        SimRequest(0.5, 0, (number + 1, 4), 40, 1.0, number, rule="rejection", top_k=1) for number in range(3)
    )
    return Scenario(seed, agree=0.0, plan="stream:2,6", requests=requests)


def lossy(seed: int) -> Scenario:
    return Scenario(seed, requests=(SimRequest(0.5, 0, (3, 4), 20, rule="threshold(0.3)"),))


# Of ends


def told_to_stop(seed: int) -> Scenario:
    """An orchestrator stops while the log is slow; clients ask it for more meanwhile."""
    requests = tuple(
        SimRequest(0.5 + number / 5, 0, (number + 1, 4), 60, request_id=f"{number}") for number in range(5)
    )
    faults = (Fault(0.5, "log_slow", "", 3.0), Fault(0.75 + seed % 7 / 10, "stop", "orchestrator-0", 1.0))
    return Scenario(seed, orchestrators=2, grace=3.0 * (seed % 2), forward=0.05, requests=requests, faults=faults)


def verifier_told_to_stop(seed: int) -> Scenario:
    requests = tuple(
        SimRequest(0.6 + number / 50, 0, (number + 1, 4), 20, request_id=f"{number}") for number in range(9)
    )
    faults = (Fault(0.8, "stop", "verifier-0", 1.0),)
    return Scenario(seed, verifiers=2, grace=3.0, forward=0.05, delay=(0.02, 0.1), requests=requests, faults=faults)


def orphaned(seed: int) -> Scenario:
    """The owner dies and stays dead; nobody asks for its session again."""
    requests = (SimRequest(0.5, 0, (3, 4), 100), SimRequest(0.5, 1, (3, 5), 20))
    return Scenario(
        seed, orchestrators=2, forward=0.1, requests=requests, faults=(Fault(1.2, "crash", "orchestrator-0", 1000.0),)
    )


def long_lived(seed: int) -> Scenario:
    """A session that runs for longer than it takes to be missed; another orchestrator has nothing to do."""
    requests = (SimRequest(0.5, 0, (3, 4), 120, request_id="a", drafting=2),)
    return Scenario(seed, orchestrators=2, drafters=0, forward=0.3, detach_grace=12.0, requests=requests)


LONG = SimRequest(0.5, 0, (3, 4), 110, request_id="a", drafting=2)


def read_at_two(seed: int, *faults: Fault, first: SimRequest = LONG, **second: Any) -> Scenario:
    """A session that a reader at another orchestrator than the one that drives it follows, too. second: its request,
    where it differs.
    """
    requests = (first, replace(first, start=0.7, at=1, **second))
    return Scenario(seed, orchestrators=2, drafters=0, forward=0.2, requests=requests, faults=faults)


def cancelled_elsewhere(seed: int) -> Scenario:
    return read_at_two(seed, cancel_after=2)


def log_lost_under_way(seed: int) -> Scenario:
    """Its owner lives, and nothing else fails: the session goes on."""
    requests = (SimRequest(0.5, 0, (3, 4), 110, request_id="a"),)
    return Scenario(seed, forward=0.1, requests=requests, faults=(Fault(1.5 + seed % 10 / 10, "log_emptied", "", 0.3),))


def deleted_elsewhere(seed: int) -> Scenario:
    return read_at_two(seed, delete_after=2)


def passed_on_before_its_deadline(seed: int) -> Scenario:
    first = SimRequest(0.5, 0, (3, 4), 110, request_id="a", drafting=2, timeout=3.0)
    requests = (first, replace(first, start=0.6, timeout=None, library=True))
    cut = Fault(1.1, "cut", "orchestrator-0-client")
    return Scenario(seed, orchestrators=2, drafters=0, forward=0.2, requests=requests, faults=(cut,))


# Of what is unequal, long, partial or hostile


def unequal(seed: int, *others: str) -> Scenario:
    """Two verifiers of the same weights; the one that has the sessions dies."""
    configs = ("", others[seed % len(others)]) if seed % 2 else (others[seed % len(others)], "")
    requests = tuple(
        SimRequest(0.5, 0, (number + 1, 4), 40 + 40 * number, request_id=f"{number}") for number in range(3)
    )
    deaths = tuple(Fault(1.2 + number, "crash", f"verifier-{number}", 30.0) for number in range(seed % 4 // 2, 2))
    return Scenario(seed, verifiers=2, forward=0.05, configs=configs, versions=True, requests=requests, faults=deaths)


def unequal_somehow(seed: int) -> Scenario:
    return unequal(seed, "eos", "tokenizer")


def unequal_tokenizers(seed: int) -> Scenario:
    return unequal(seed, "tokenizer")


def swapped(seed: int) -> Scenario:
    """The verifier is back at once, and is another one."""
    requests = tuple(SimRequest(0.5, 0, (number + 1, 4), 80, request_id=f"{number}") for number in range(3))
    swap = Fault(1.0 + seed % 10 / 20, "swap", "verifier-0", 0.3, to="eos")
    return Scenario(seed, forward=0.05, versions=True, requests=requests, faults=(swap,))


def failed_over(seed: int) -> Scenario:
    """Replicas take the log over whose clocks are behind. The second lacks a claim, of whose owner it does not hear."""
    request = SimRequest(0.5, 0, (3, 4), 100, request_id="a", drafting=2)
    late = seed % 20 / 50
    faults = (
        Fault(0.6, "log_failover", "", -20.0),
        Fault(1.5, "cut", "orchestrator-0-client"),
        Fault(1.6 + late, "log_failover", "", -20.0),
        Fault(1.95 + late, "log_cut", "orchestrator-1", 4.0),
        Fault(2.1 + late, "cut", "orchestrator-1-client"),
    )
    return Scenario(seed, orchestrators=2, drafters=0, forward=0.1, requests=(request,), faults=faults)


def failed_over_without_the_claimer(seed: int) -> Scenario:
    """The replica lacks a claim whose owner dies; the verifier knows its fence."""
    request = SimRequest(0.5, 0, (3, 4), 100, request_id="a", drafting=2)
    late = seed % 20 / 50
    faults = (
        Fault(1.5, "cut", "orchestrator-0-client"),
        Fault(1.6 + late, "log_failover", "", -20.0),
        Fault(1.95 + late, "crash", "orchestrator-1", 1000.0),
    )
    return Scenario(seed, orchestrators=2, drafters=0, forward=0.1, requests=(request,), faults=faults)


def cancelled_before_an_outage(seed: int) -> Scenario:
    """By a reader elsewhere. Before the session's owner hears of it the log loses it, and does not answer for long."""
    at = 0.95 + seed % 20 / 40
    faults = (Fault(at - 0.3, "log_behind", "", 0.31), Fault(at, "log_down", "", 25.0))
    return read_at_two(seed, *faults, cancel_after=2)


def deleted_before_a_loss(seed: int) -> Scenario:
    """Likewise, and the log comes back empty at once."""
    return read_at_two(seed, Fault(0.95 + seed % 20 / 40, "log_emptied"), delete_after=2)


def cancelled_in_an_outage(seed: int) -> Scenario:
    """Of which the session's owner is tired at last; another reader comes back after it.

    The log falls silent in the few hundredths of a second around the third token.
    """
    down = Fault(1.1 + seed % 20 / 500, "log_down", "", 34.0)
    return read_at_two(seed, down, first=replace(LONG, cancel_after=3), cancel_after=None)


def ended_elsewhere_and_forgotten(seed: int) -> Scenario:
    """An owner does not reach the log while the session is claimed, ended and forgotten there."""
    cut = Fault(1.0 + seed % 20 / 25, "log_cut", "orchestrator-0", 24.0)
    return replace(read_at_two(seed, cut, first=replace(LONG, max_tokens=12)), retention=2.0)


def damaged_and_taken(seed: int) -> Scenario:
    """Two sessions are followed elsewhere when their records are damaged; then their readers want them there."""
    requests = [SimRequest(0.5, 0, (number + 1, 4), 60, request_id=f"{number}", drafting=2) for number in range(2)]
    followed = [replace(request, start=0.7, at=1) for request in requests]
    damage = [Fault(1.2 + number / 100, "log_damaged", to="record") for number in range(3)]
    cut = Fault(1.25 + seed % 10 / 20, "cut", "orchestrator-0-client")
    return Scenario(
        seed, orchestrators=2, drafters=0, forward=0.2, requests=(*requests, *followed), faults=(*damage, cut)
    )


def out_of_memory(seed: int) -> Scenario:
    requests = tuple(SimRequest(0.5 + number / 4, 0, (number + 1, 4), 20) for number in range(4))
    return Scenario(seed, requests=requests, faults=(Fault(0.7, "log_full", "", 3.0),))
