"""A scored prompt as answers tell it: OpenAI's `echo` with `logprobs`, and vLLM's `prompt_logprobs`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from orchestrator.api.calls import Part
from orchestrator.api.scores import PromptScorer, PromptScores
from orchestrator.http.endpoint import Served
from orchestrator.http.openai.requests import CompletionRequest
from specwire.core.law.sampling import finite
from specwire.text import OutputText
from specwire.text.tokenizer import TokenBytes
from specwire.v1 import common_pb2
from specwire.v1 import generation_pb2 as pb

Json = dict[str, Any]


def echoed(scores: PromptScores, top: int, served: Served) -> Json:
    """As `logprobs` of a completion that begins with its prompt: the first token has none, nothing stands before it."""
    names = served.names
    ends = OutputText(served.target.tokenizer).push(scores.tokens).text_ends
    return {
        "tokens": [names.text(token) for token in scores.tokens],
        "token_logprobs": [None, *(finite(known.logprob) for known in scores.logprobs)],
        "top_logprobs": [None, *by_text(scores.tokens[1:], scores.logprobs, top, names)],
        "text_offset": [0, *ends[:-1]],
    }


def by_text(
    tokens: Iterable[int], logprobs: Iterable[common_pb2.TokenLogprobs], top: int, names: TokenBytes
) -> Iterator[Json]:
    """Of each token the most probable ones and its own, by text. Of several with one text the most probable counts."""
    for token, known in zip(tokens, logprobs, strict=True):
        best = list(zip(known.top_ids, known.top_logprobs, strict=True))[:top]
        yield {names.text(each): finite(logprob) for each, logprob in [(token, known.logprob), *reversed(best)]}


def by_id(scores: PromptScores, top: int, names: TokenBytes) -> list[Json | None]:
    """VLLM's `prompt_logprobs`: for each token the most probable ids and, where it is none of them, its own."""
    own = zip(scores.tokens[1:], scores.logprobs, scores.ranks, strict=True)
    return [None, *(_entries(token, known, rank, top, names) for token, known, rank in own)]


def _entries(token: int, known: common_pb2.TokenLogprobs, rank: int, top: int, names: TokenBytes) -> Json:
    best = list(zip(known.top_ids, known.top_logprobs, strict=True))[:top]
    told = [(each, logprob, place) for place, (each, logprob) in enumerate(best, 1)]
    if all(each != token for each, _, _ in told):
        told.append((token, known.logprob, rank))
    return {
        str(each): {"logprob": finite(logprob), "rank": place, "decoded_token": names.text(each)}
        for each, logprob, place in told
    }


def joined(first: Json | None, second: Json | None) -> Json | None:
    """The log-probabilities of two texts that follow each other."""
    if first is None or second is None:
        return first or second
    return {name: [*first[name], *second[name]] for name in second}


async def scored(
    scorer: PromptScorer,
    request: CompletionRequest,
    requests: Sequence[pb.GenerateRequest],
    tenant: str,
    served: Served,
) -> AsyncGenerator[tuple[int, Part | PromptScores], None]:
    """The scores of each prompt, for each of its sessions; where nothing is generated, the end of each as well.

    requests: the sessions', those of one prompt side by side. One prompt at a time: each needs a verifier's slot.
    """
    clock = asyncio.get_running_loop().time
    until = None if request.timeout is None else clock() + request.timeout
    for first, after in pairwise(range(0, len(requests) + 1, request.n)):
        left = None if until is None else until - clock()
        asked = requests[first], served.target, tenant, request.scored, left
        scores = await scorer.score(*asked, request_id=request.request_id)
        for index in range(first, after):
            yield index, scores
            if request.scores_only:
                length = len(scores.tokens)
                yield index, pb.Started(prompt_tokens=length, sampling=request.template.sampling)
                reason, stats = common_pb2.FINISH_REASON_LENGTH, pb.Stats(prompt_tokens=length)
                yield index, pb.Finished(reason=reason, stats=stats)
