"""What a request has used, and what speculation did for it: in OpenAI's usage, and vLLM's metrics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from specwire.v1 import generation_pb2 as pb

Json = dict[str, Any]


class DraftTally(NamedTuple):
    """What became of draft tokens; see `Stats.proposed`."""

    proposed: int
    tested: int
    accepted: int

    @property
    def acceptance(self) -> float | None:
        """Share of the judged draft tokens that was accepted; None where none was judged."""
        return round(self.accepted / self.tested, 4) if self.tested else None


def by_source(stats: Sequence[pb.Stats]) -> dict[str, DraftTally]:
    """By the names that `specwire.sources` has; `prediction` is what the request brought along."""
    found = {
        "ngram": _sum((each.proposed_ngram, each.tested_ngram, each.accepted_ngram) for each in stats),
        "heads": _sum((each.proposed_head, each.tested_head, each.accepted_head) for each in stats),
        "prediction": _sum(
            (each.proposed_prediction, each.tested_prediction, each.accepted_prediction) for each in stats
        ),
    }
    theirs, whole = _sum(found.values()), total(stats)
    rest = [max(0, of_all - other) for of_all, other in zip(whole, theirs, strict=True)]
    return {"drafters": DraftTally(*rest), **found}


def total(stats: Sequence[pb.Stats]) -> DraftTally:
    return _sum((each.proposed, each.tested, each.accepted) for each in stats)


def _sum(counts: Iterable[tuple[int, int, int]]) -> DraftTally:
    whole = DraftTally(0, 0, 0)
    for each in counts:
        whole = DraftTally(*(before + more for before, more in zip(whole, each, strict=True)))
    return whole


def counts(prompt: int, completion: int) -> Json:
    """Tokens, as OpenAI's usage names them."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def usage_of(stats: Sequence[pb.Stats], n: int, predicted: bool) -> Json:
    """OpenAI's usage of sessions of which each `n` share a prompt. predicted: the request has a prediction, references.

    Without any, the prediction tokens of `completion_tokens_details` are all draft tokens: there AIPerf looks for them.
    """
    prompt = sum(each.prompt_tokens for each in stats[::n])
    completion = sum(each.output_tokens for each in stats)
    counted = by_source(stats)["prediction"] if predicted else total(stats)
    return {
        **counts(prompt, completion),
        "prompt_tokens_details": {"cached_tokens": sum(each.cached_tokens for each in stats[::n])},
        "completion_tokens_details": {
            "accepted_prediction_tokens": counted.accepted,
            "rejected_prediction_tokens": counted.proposed - counted.accepted,
        },
        "speculative_decoding": _told(stats),
    }


def _told(stats: Sequence[pb.Stats]) -> Json:
    whole = total(stats)
    sources = {name: each._asdict() for name, each in by_source(stats).items()}
    forwards = sum(each.target_forwards for each in stats)
    return {**whole._asdict(), "acceptance": whole.acceptance, "target_forwards": forwards, "sources": sources}


def metrics_of(stats: Sequence[pb.Stats]) -> Json:
    """VLLM's `metrics.speculative_decoding` (--per-request-spec-decode-metrics summary), as AIPerf checks it.

    acceptance_histogram[i]: windows of which i tokens were accepted; the other figures agree with it. So they are of
    windows only: a draft token that came during a forward is in `usage`, not here.
    """
    width = max((len(each.tested_at) for each in stats), default=0)
    tested, accepted = (
        [sum(counts[index] for counts in told if index < len(counts)) for index in range(width)]
        for told in ([each.tested_at for each in stats], [each.accepted_at for each in stats])
    )
    whole, steps = total(stats), tested[0] if tested else 0
    proposed = whole.proposed - whole.tested + sum(tested)
    reached = [steps, *accepted, 0]  # windows of which so many tokens, or more, were accepted
    return {
        "speculative_decoding": {
            "mean_acceptance_length": 1 + sum(accepted) / steps if steps else 1.0,
            "draft_acceptance_rate": sum(accepted) / proposed if proposed else 0.0,
            "acceptance_histogram": [more - beyond for more, beyond in pairwise(reached)],
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": sum(accepted),
            "num_draft_tokens": proposed,
            "num_spec_tokens": width,
        }
    }
