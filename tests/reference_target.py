"""What a scripted target alone decides and reports, by the reference rules, without windows.

The text is counted anew at each position and the logits are processed by `specwire.core.law.sampling`, which
tests/core/test_sampling.py holds against transformers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from specwire.core.law.acceptance import choose
from specwire.core.law.sampling import History, LogprobsOf, Sampling, log_probabilities, report
from specwire.core.messages import FinishReason, TokenLogprobs
from specwire.core.text import Stopping
from specwire.lm.scripted import EOS_ID, Script

Told = tuple[list[int], list[TokenLogprobs], FinishReason]


def alone(script: Script, prompt: Sequence[int], sampling: Sampling, stopping: Stopping) -> Told:
    """Tokens behind the prompt, a report for each, and why the text ends."""
    text, reports = list(prompt), []
    ends = stopping.stop_ids | (frozenset() if stopping.ignore_eos else {EOS_ID})
    prefix = 0
    for token in prompt:
        prefix = script.extend(prefix, token)
    while True:
        output = text[len(prompt) :]
        logits = script.logits(prefix, len(text)).astype(np.float64)
        seen = History(prompt, output).seen() if sampling.penalised else None
        banned = tuple(ends) if len(output) < stopping.min_tokens else ()
        token = choose(logits, len(text), sampling, seen, banned)
        of_model = sampling.logprobs_of is LogprobsOf.MODEL
        log_p = log_probabilities(logits, *((Sampling(),) if of_model else (sampling, seen, banned)))
        reports.append(report(log_p, token, sampling.logprobs or 0))
        text.append(token)
        prefix = script.extend(prefix, token)
        if token in ends:
            reason = FinishReason.EOS if token == EOS_ID and not stopping.ignore_eos else FinishReason.STOP_ID
            return text[len(prompt) :], reports, reason
        if len(output) + 1 == stopping.max_tokens:
            return text[len(prompt) :], reports, FinishReason.LENGTH


def close(got: Sequence[TokenLogprobs], expected: Sequence[TokenLogprobs]) -> bool:
    """The ids are equal, the values up to the last bit: torch and numpy sum in different orders."""
    pairs = list(zip(got, expected, strict=True))
    same_ids = all([t for t, _ in a.top] == [t for t, _ in b.top] for a, b in pairs)
    values = [(a.logprob, b.logprob) for a, b in pairs] + [
        (x, y) for a, b in pairs for (_, x), (_, y) in zip(a.top, b.top, strict=True)
    ]
    return same_ids and all(x == pytest.approx(y, rel=1e-5, abs=1e-6) for x, y in values)
