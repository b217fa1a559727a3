"""An EAGLE-3 head of planted agreement, for targets of `shapes`: what it says follows from the token it read last.

Its attention sees almost only the row itself, whose values bring that token's embedding through random matrices into
the residual stream; the state beside it counts for next to nothing. Its output layer has what comes out there at the
place of the token that is to be said. So its guesses are known, at each depth and whatever stands before, and agree
with the target's for any share of the ids that is wanted. Shapes are those of published heads: every weight is read and
every product computed as in a trained one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from bench.gpu.shapes import EMBEDDING_SCALE, ModelShape
from specwire.core.draft import HeadRequest
from specwire.core.model import ModelInfo
from specwire.lm.heads.eagle3 import EMBEDDING, Eagle3, Eagle3Config, Eagle3Runner, default_taps
from specwire.lm.heads.slots import HeadedModel
from specwire.lm.kv_cache import Runner

# Ids that a published head of a target of 128,256 says. A smaller target's head says all.
DRAFT_VOCABULARY = 32_000
# Of a head's keys: in fewer dimensions another token's is too often as near to a query as its own.
LEAST_HEAD_DIM = 64
# Weights that are arranged for nothing, as they are initialised.
INITIAL = 0.02
# What the state counts beside the token. A query's product with its own key, behind which all others vanish.
STATE_SCALE, OWN_SCORE = 0.01, 64.0


class CountedHead(HeadedModel):
    """A target with a head. forwards: of the head, but for texts that it read."""

    forwards = 0

    def draft(self, requests: Sequence[HeadRequest]) -> list[list[int]]:
        drafted = super().draft(requests)
        self.forwards += max(map(len, drafted), default=0)
        return drafted


def beside(runner: Runner, info: ModelInfo, slots: int, head: Eagle3) -> CountedHead:
    """`head` over the slots of the target that `runner` computes, which taps what it reads."""
    weight = head.fc.weight
    drafter = Eagle3Runner(head, info.vocabulary, slots, info.context, weight.dtype, device=weight.device)
    return CountedHead(runner, info, slots, (), drafter)


@torch.no_grad()
def planted(shape: ModelShape, target: PreTrainedModel, after: Sequence[int], said: Sequence[int], seed: int) -> Eagle3:
    """A head that says after[t] behind token t. after: a permutation. said: ids that it must be able to say."""
    torch.manual_seed(seed)
    ids = _draft_ids(shape.vocabulary, said)
    config = Eagle3Config(
        hidden=shape.hidden,
        inner=shape.intermediate,
        heads=shape.heads,
        key_heads=shape.kv_heads,
        head_dim=max(LEAST_HEAD_DIM, shape.hidden // shape.heads),
        vocabulary=shape.vocabulary,
        draft_vocabulary=len(ids),
        taps=default_taps(shape.layers),
        norm_before_residual=True,
    )
    embedding = target.get_input_embeddings().get_parameter("weight")
    with torch.device("meta"):
        head = Eagle3(config)
    head.embed_tokens.weight = torch.nn.Parameter(embedding, requires_grad=False)
    for part in (each for each in head.children() if each is not head.embed_tokens):
        part.to_empty(device=embedding.device)
    for name, weight in head.named_parameters():
        if weight.ndim == 1:
            weight.fill_(1.0)
        elif name != EMBEDDING:
            weight.normal_(0.0, INITIAL)
    head.d2t = ids.to(embedding.device) - torch.arange(len(ids), device=embedding.device)
    _arrange(head)
    before = torch.empty(shape.vocabulary, dtype=torch.long)
    before[torch.tensor(list(after))] = torch.arange(shape.vocabulary)
    head.lm_head.weight.copy_(_said_behind(head, before[ids].to(embedding.device)))
    return head.to(embedding.dtype).eval().requires_grad_(False)


def forward_bytes(head: Eagle3) -> int:
    """What each forward of it reads: all weights but embeddings, and what fuses features, which only the first does."""
    needless = (EMBEDDING, "fc.weight")
    return sum(weight.nbytes for name, weight in head.named_parameters() if name not in needless)


def _draft_ids(vocabulary: int, said: Sequence[int]) -> torch.Tensor:
    """As many as published heads have, those of `said` before others; in order."""
    chosen = dict.fromkeys((*said, *range(vocabulary)))
    count = min(vocabulary, max(DRAFT_VOCABULARY, len(set(said))))
    return torch.tensor(sorted(list(chosen)[:count]))


def _arrange(head: Eagle3) -> None:
    config = head.config
    hidden, share = config.hidden, config.heads // config.key_heads
    head.hidden_norm.weight.fill_(STATE_SCALE)
    # A query is its own row's key: of normed embeddings, so that all are about as long.
    keys = head.k_proj.weight[:, :hidden]
    keys.normal_(0.0, (OWN_SCORE / config.head_dim**0.5 / hidden) ** 0.5)
    queries = keys.view(config.key_heads, config.head_dim, hidden).repeat_interleave(share, 0)
    head.q_proj.weight[:, :hidden] = queries.reshape(-1, hidden)
    head.v_proj.weight[:, :hidden].normal_(0.0, hidden**-0.5)
    head.o_proj.weight.normal_(0.0, EMBEDDING_SCALE * (config.heads * config.head_dim) ** -0.5)


def _said_behind(head: Eagle3, tokens: torch.Tensor) -> torch.Tensor:
    """(tokens, hidden): what each brings into the residual stream, of about unit length in each dimension."""
    config = head.config
    normed = head.input_layernorm(head.embed_tokens.weight[tokens].float())
    values = (normed @ head.v_proj.weight[:, : config.hidden].T).unflatten(-1, (config.key_heads, config.head_dim))
    attended = values.repeat_interleave(config.heads // config.key_heads, 1).flatten(1)
    brought: torch.Tensor = head.o_proj(attended) / EMBEDDING_SCALE
    return brought
