"""Models of the shapes of well-known ones. Their weights are random, arranged so that the next token is known.

The embeddings are so large that they outweigh what the layers add, and the output layer has each token's embedding at
its successor's place. So the target's text is a walk, known without a forward and far from any tie. A drafter that
shares only a part of the successors has any acceptance that is wanted. Every weight is read and every product computed
as in a trained model of the shape. For measurements only: such a model says nothing.

An EAGLE-3 head beside such a target is arranged likewise: what it says follows from the token that it read last. Its
attention sees almost only the row itself, whose values bring that token's embedding through random matrices into the
residual stream; the state beside it counts for next to nothing. Its output layer has what comes out there at the place
of the token that is to be said. So its guesses are known, at each depth and whatever stands before, and agree with the
target's for any share of the ids that is wanted. Its shape is that of published heads.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel

from specwire.core.draft import HeadRequest
from specwire.core.model import ModelInfo
from specwire.lm.heads.eagle3 import EMBEDDING, Eagle3, Eagle3Config, Eagle3Runner, default_taps
from specwire.lm.heads.slots import HeadedModel
from specwire.lm.kv_cache import Runner

# Above what the layers add, over all of them.
EMBEDDING_SCALE = 30.0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a Llama."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int

    def config(self, context: int) -> PreTrainedConfig:
        return LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=context,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
            tie_word_embeddings=False,
        )

    @property
    def kv_bytes_per_position(self) -> int:
        """In a type of two bytes."""
        return 2 * 2 * self.layers * self.kv_heads * (self.hidden // self.heads)


SHAPES = {
    "llama-8b": ModelShape(32, 4096, 14336, 32, 8, 128_256),
    "llama-3b": ModelShape(28, 3072, 8192, 24, 8, 128_256),
    "llama-1b": ModelShape(16, 2048, 8192, 32, 8, 128_256),
    "tiny": ModelShape(2, 64, 96, 4, 2, 128),
    "tiny-draft": ModelShape(1, 64, 64, 4, 2, 128),
}


def successors(vocabulary: int, seed: int) -> list[int]:
    """A permutation of the ids: what follows each. One cycle, so a walk does not repeat itself soon."""
    order = list(range(vocabulary))
    random.Random(seed).shuffle(order)
    after = [0] * vocabulary
    for index, token in enumerate(order):
        after[token] = order[(index + 1) % vocabulary]
    return after


def agreeing(after: Sequence[int], acceptance: float, seed: int) -> list[int]:
    """A permutation with the same successors for this share of the ids, drawn at random."""
    chance = random.Random(seed)
    others = [token for token in range(len(after)) if chance.random() >= acceptance]
    changed = list(after)
    for index, token in enumerate(others):
        changed[token] = after[others[(index + 1) % len(others)]]
    return changed


def walk(after: Sequence[int], start: int, count: int) -> list[int]:
    """`count` ids, from `start` on."""
    text = [start]
    while len(text) < count:
        text.append(after[text[-1]])
    return text


@torch.no_grad()
def build(
    shape: ModelShape, after: Sequence[int], context: int, dtype: torch.dtype, device: torch.device, seed: int
) -> PreTrainedModel:
    """Random weights, and the arrangement above: after token t comes after[t]."""
    torch.manual_seed(seed)
    with device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(shape.config(context), dtype=dtype)
    model.eval().requires_grad_(False)
    embedding = torch.randn(shape.vocabulary, shape.hidden, dtype=dtype, device=device)
    head = torch.empty_like(embedding)
    head[torch.tensor(list(after), device=device)] = embedding
    for name, weight in (("model.embed_tokens.weight", EMBEDDING_SCALE * embedding), ("lm_head.weight", head)):
        model.get_parameter(name).copy_(weight)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


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
