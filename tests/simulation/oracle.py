"""Plain decoding: what every request's text must be, whatever happened on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from specwire.core.acceptance import choose
from specwire.core.limits import FinishReason, Stopping
from specwire.core.sampling import Sampling
from specwire.lm.scripted import EOS_ID, Script
from tests.simulation.services import CONTEXT


@dataclass(frozen=True)
class Oracle:
    """raw: prompt and what a verifier decides that knows no stop strings. hashes: the script's, by length of text.

    tokens: raw up to the one that completes a stop string, without the prompt.
    """

    prompt: tuple[int, ...]
    raw: tuple[int, ...]
    hashes: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str
    reason: FinishReason


def plain(
    script: Script,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    sampling: Sampling,
    stopping: Stopping,
    stops: Sequence[str],
) -> Oracle:
    hashes, raw = [0], list(prompt)
    for token in prompt:
        hashes.append(script.extend(hashes[-1], token))
    reason = None
    while reason is None:
        logits = script.logits(hashes[-1], len(raw)).astype(np.float64)
        token = choose(logits, len(raw), sampling)
        raw.append(token)
        hashes.append(script.extend(hashes[-1], token))
        if token == EOS_ID and not stopping.ignore_eos:
            reason = FinishReason.EOS
        elif len(raw) - len(prompt) >= stopping.max_tokens or len(raw) >= CONTEXT:
            reason = FinishReason.LENGTH
    tokens, text, reason = _cut(tokenizer, raw[len(prompt) :], stops, reason)
    return Oracle(tuple(prompt), tuple(raw), tuple(hashes), tokens, text, reason)


def _cut(
    tokenizer: Tokenizer, tokens: list[int], stops: Sequence[str], reason: FinishReason
) -> tuple[tuple[int, ...], str, FinishReason]:
    """At the stop string that is completed first; of two completed by the same character, the longer."""
    whole = tokenizer.decode(tokens)
    ends = [end for end in range(1, len(whole) + 1) if whole[:end].endswith(tuple(stops))] if stops else []
    if not ends:
        return tuple(tokens), whole, reason
    cut = min(ends[0] - len(stop) for stop in stops if whole[: ends[0]].endswith(stop))
    count = next(n for n in range(1, len(tokens) + 1) if len(tokenizer.decode(tokens[:n])) >= ends[0])
    return tuple(tokens[:count]), whole[:cut], FinishReason.STOP_STRING
