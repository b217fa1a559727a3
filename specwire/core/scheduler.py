"""What the next step does: a pure function of what it is shown (no model, no clock, no queue).

Every session with room gets at least one row behind its text, so a step decides at least one token for each whose
prompt is in the cache. Prompts come in chunks under a budget: a long one delays the others by no more than that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from specwire.core.chain import SourceKind
from specwire.core.dividing import Windows, divided, filled
from specwire.core.shares import MOST_WINDOW, Awaited, Share, StepCandidate, StepPlan, V
from specwire.core.speed import AcceptanceByPosition, expected_tokens, worth_waiting

PREFILL_ROWS = 512
# How long a patient verifier waits for tokens that are due.
PATIENCE_US = 5e6


def schedule(
    candidates: Sequence[StepCandidate],
    now_us: float,
    V: V,
    prefill_rows: int = PREFILL_ROWS,
    patient: bool = False,
    waited_us: float = 0.0,
    most_rows: float = math.inf,
) -> StepPlan:
    """Plan a step. V(m): expected microseconds of a step of m rows.

    patient: wait for all that is due and test all of it, whatever it costs, and keep no ledger. Textbook speculation,
    and streaming with a verifier that waits, are measured so; nobody is served so. waited_us: since the last step;
    patience has an end too. most_rows: beyond which a step of sessions that decode is given no draft token.
    """
    decoding = [candidate for candidate in candidates if candidate.uncached == 1]
    prompts = _chunks([candidate for candidate in candidates if candidate.uncached > 1], prefill_rows)
    if patient:
        if any(candidate.missing > 0 for candidate in decoding) and waited_us < PATIENCE_US:
            return StepPlan((), now_us + PATIENCE_US - waited_us)
        windows = filled(decoding)
    else:
        windows = divided(decoding, V, most_rows)
    shares = [_share(each.slot, windows) for each in decoding]
    if patient or prompts:
        return StepPlan((*shares, *prompts))
    return StepPlan(tuple(shares), _wait(decoding, shares, now_us, windows, V))


def _share(slot: int, windows: Windows) -> Share:
    window = windows.of(slot)
    return Share(slot, 1, window.width, True, window.kind)


def _chunks(candidates: Sequence[StepCandidate], budget: int) -> list[Share]:
    """Of prompts, in the order given, `budget` tokens in all."""
    chunks = []
    for candidate in candidates:
        fresh = min(candidate.uncached, budget)
        if fresh:
            chunks.append(Share(candidate.slot, fresh, 0, fresh == candidate.uncached))
        budget -= fresh
    return chunks


def _wait(
    candidates: Sequence[StepCandidate], shares: Sequence[Share], now_us: float, windows: Windows, V: V
) -> float | None:
    """Until when to wait, if the proposals due by then are worth it: (B + g) / (V(m + n) + w) > B / V(m).

    A session whose ledger could not bear it vetoes: its tokens would wait for the others' proposals.
    """
    if all(candidate.awaited is None for candidate in candidates):
        return None
    rows, B = windows.rows, windows.tokens
    spare = min((candidate.spare_us for candidate in candidates), default=0.0)
    planned = {share.slot: share for share in shares}
    due = sorted(
        ((c.awaited, c) for c in candidates if c.awaited is not None and c.awaited.latest_us > now_us),
        key=lambda pair: pair[0].expected_us,
    )
    until, best_rate, g, n, w = None, 0.0, 0.0, 0, 0.0
    for awaited, candidate in due:
        more, gain = _more(candidate, planned[candidate.slot], awaited)
        g += awaited.chance * gain
        n += more
        w = max(w, awaited.expected_us - now_us)
        rate = (B + g) / (V(rows + n) + w)
        worst = awaited.latest_us - now_us + V(rows + n) - V(len(shares))
        if spare >= worst and worth_waiting(B, g, V(rows), V(rows + n), w) and rate > best_rate:
            until, best_rate = awaited.latest_us, rate
    return until


def _tokens(acceptance: AcceptanceByPosition, window: int) -> float:
    return expected_tokens(acceptance.rates(window), window) if window else 1.0


def _expected(candidate: StepCandidate, share: Share) -> float:
    if share.kind is not SourceKind.DRAFTER and candidate.guess is not None:
        return _tokens(candidate.guess.acceptance, share.window)
    return _tokens(candidate.acceptance, share.window)


def _more(candidate: StepCandidate, share: Share, awaited: Awaited) -> tuple[int, float]:
    """Rows and expected tokens that the session's part would grow by if `awaited` were there.

    The chain's window grows. A guess gives way to the chain, if that is then expected to decide more.
    """
    window = share.window if share.kind is SourceKind.DRAFTER else candidate.drafted
    wider = min(MOST_WINDOW, window + awaited.tokens, candidate.room - 1)
    gain = _tokens(candidate.acceptance, wider) - _expected(candidate, share)
    if gain <= 0.0 and share.kind is not SourceKind.DRAFTER:
        return 0, 0.0
    return wider - share.window, gain
