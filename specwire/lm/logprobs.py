"""What is reported of decided tokens: the vectorised twin of `specwire.core.logprobs`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specwire.core.logprobs import TokenLogprobs, rounded
from specwire.core.sampling import LogprobsOf
from specwire.lm.choose import RowSampling, log_probabilities


@torch.inference_mode()
def logprobs(logits: torch.Tensor, rows: Sequence[RowSampling], tokens: Sequence[int]) -> tuple[TokenLogprobs, ...]:
    """One per token: tokens[i] was decided from logits[i]; the rows are of one session, which asked for a report.

    Args:
        logits: (len(tokens), vocabulary).
    """
    sampling = rows[0].sampling
    if sampling.logprobs_of is LogprobsOf.PROCESSED:
        log_p = log_probabilities(logits, rows)
    else:
        log_p = logits.double().log_softmax(dim=1)
    own = log_p.gather(1, torch.tensor(tokens, device=log_p.device).unsqueeze(1)).squeeze(1).tolist()
    top = _top(log_p, sampling.logprobs or 0)
    return tuple(TokenLogprobs(rounded(value), best) for value, best in zip(own, top, strict=True))


def _top(log_p: torch.Tensor, count: int) -> list[tuple[tuple[int, float], ...]]:
    """The best ids of each row. Which of equal ones `topk` returns is undefined, so all that equal the last compete."""
    if count == 0:
        return [()] * len(log_p)
    last = log_p.topk(min(count, log_p.shape[1]), dim=1).values[:, -1:]
    rivals = (log_p >= last) & (log_p > -torch.inf)
    return [_best_ids(row, rival, count) for row, rival in zip(log_p, rivals, strict=True)]


def _best_ids(log_p: torch.Tensor, rival: torch.Tensor, count: int) -> tuple[tuple[int, float], ...]:
    ids = rival.nonzero().squeeze(1)
    ordered, order = log_p[ids].sort(descending=True, stable=True)
    chosen = zip(ids[order[:count]].tolist(), ordered[:count].tolist(), strict=True)
    return tuple((token, rounded(value)) for token, value in chosen)
