"""A verifier's figures, read when somebody asks; see docs/OPERATIONS.md."""

from __future__ import annotations

from collections import Counter

from specwire.core.messages import Outcome
from specwire.registry.entry import Load
from specwire.telemetry.metrics import Families, by_label, counter, draft_families, gauge, histogram
from verify_service.engine.engine import Engine, EngineTally
from verify_service.engine.shares import TenantShares


def families(engine: Engine) -> Families:
    yield from _of_speculation(engine.tally)
    yield from _of_steps(engine.tally)
    yield from _of_sessions(engine)
    if engine.shares is not None:
        yield from _of_tenants(engine, engine.shares)


def _of_speculation(tally: EngineTally) -> Families:
    prefix = "spec_decode_num"
    by_position = {str(index): count for index, count in enumerate(tally.accepted_at) if count}
    yield counter(f"{prefix}_drafts_total", "Windows of draft tokens.", tally.windows)
    yield from draft_families(tally.drafts)
    yield by_label(
        counter,
        f"{prefix}_accepted_tokens_per_pos_total",
        "Draft tokens accepted, by place in the window.",
        "position",
        by_position,
    )
    yield counter("rollbacks_total", "Windows of which a token was refused: the cache goes back.", tally.refused)
    offers = {offer.value: count for offer, count in dict(tally.offers).items()}
    yield by_label(counter, "proposals_total", "Proposals that came, by what became of them.", "result", offers)
    outcomes = {outcome.name.lower(): tally.outcomes[outcome] for outcome in Outcome}
    yield by_label(counter, "decided_tokens_total", "Tokens decided, by how.", "outcome", outcomes)


def _of_steps(tally: EngineTally) -> Families:
    yield histogram("forward_seconds", "The target's forwards.", tally.forward_s)
    yield histogram("choose_seconds", "Choosing the tokens of a step.", tally.choose_s)
    yield histogram("batch_rows", "Rows of a forward.", tally.rows)
    yield histogram("batch_sessions", "Sessions in a forward.", tally.sessions)
    yield counter("step_gap_seconds_total", "Between forwards, neither waiting, drafting nor idle.", tally.gap_us / 1e6)
    yield counter("step_waited_seconds_total", "Waiting for proposals that were due.", tally.waited_us / 1e6)
    yield counter("step_drafted_seconds_total", "A head reading and drafting between forwards.", tally.drafted_us / 1e6)


def _of_sessions(engine: Engine) -> Families:
    """Read beside the engine's thread: each number is right by itself, and all are of about the same moment."""
    sessions, lm = engine.sessions, engine.lm
    held = list(sessions.roster)
    waiting, present = sum(each.waiting for each in held), len(sessions.roster)
    cached = sum(lm.cached(slot) for slot in range(lm.slots))
    states = {"served": max(0, present - waiting), "waiting": waiting, "idle": max(0, len(held) - present)}
    yield by_label(gauge, "sessions", "Sessions by state.", "state", states)
    yield gauge("slots", "Sessions that fit at once.", lm.slots)
    yield gauge(
        "slots_kept", "Slots of ended sessions, kept for others that begin alike.", sessions.slot_queue.slots.kept
    )
    yield gauge("kv_cache_usage_ratio", "Positions in use of all there are.", cached / (lm.slots * lm.info.context))
    yield gauge("kv_cache_bytes", "Memory of keys and values.", lm.kv_bytes)
    prefixes = dict(sessions.slot_queue.slots.counts)
    yield by_label(counter, "kv_prefixes_total", "Kept prefixes, by what became of them.", "event", prefixes)
    texts = sessions.texts
    yield gauge("shared_texts", "Texts of sessions kept to propose from.", texts.texts)
    yield gauge("shared_texts_bytes", "Memory that they may take.", texts.size)
    yield gauge("references_bytes", "Memory that requests' references may take.", sessions.references.size)
    ignored = dict(sessions.counts)
    yield by_label(counter, "ignored_total", "What was ignored or let go.", "reason", ignored)
    plain_us = engine.costs.plain(1)
    ledgers = [each.session.ledger for each in held if not each.waiting]
    in_debt = sum(ledger.spare_us(plain_us) < 0 for ledger in ledgers)
    balance_us = sum(ledger.balance_us for ledger in ledgers)
    yield gauge("ledger_sessions_in_debt", "Sessions that decode plainly: speculation cost too much.", in_debt)
    yield gauge(
        "ledger_balance_seconds", "Time lost to speculation by the sessions held; negative: gained.", balance_us / 1e6
    )
    yield gauge("plain_step_seconds", "A forward of one row, as measured.", plain_us / 1e6)


def _of_tenants(engine: Engine, shares: TenantShares) -> Families:
    """By names that the operator's file has; all others together are one."""
    told = (
        ("decided_tokens", "Tokens decided.", shares.decided),
        ("prompt_tokens", "Tokens of prompts that were fed.", shares.prefilled),
        ("rows", "Rows of decoding steps.", shares.rows),
        ("sessions_refused", "Sessions beyond a limit, or that found no slot.", shares.refused),
    )
    for name, text, counts in told:
        yield by_label(counter, f"tenant_{name}_total", f"{text} By tenant.", "tenant", dict(counts))
    seconds = {label: kept / 1e6 for label, kept in dict(shares.kv_byte_us).items()}
    yield by_label(
        counter, "tenant_kv_byte_seconds_total", "Keys and values in slots, by time. By tenant.", "tenant", seconds
    )
    held = Counter(shares.label(each.tenant) for each in list(engine.sessions.roster))
    yield by_label(gauge, "tenant_sessions", "Sessions held. By tenant.", "tenant", held)


def load_of(engine: Engine) -> Load:
    """The load for the registry. Idle sessions give way, so their slots count as free."""
    held = list(engine.sessions.roster)
    waiting = sum(each.waiting for each in held)
    running = max(0, len(engine.sessions.roster) - waiting)
    queue_s = round(engine.sessions.slot_queue.queue_us() / 1e6, 3)
    return Load(running, waiting, max(0, engine.lm.slots - running), queue_s)
