"""Heads of random weights, and what another reader makes of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PreTrainedModel

from specwire.lm.heads.eagle3 import Eagle3, Eagle3Config, save
from tests.lm import models
from tests.lm.heads.original_eagle3 import OriginalEagle3, original_of

LAYERS = 6
OUTPUT = "lm_head.weight"
CONFIG = Eagle3Config(
    hidden=16,
    inner=24,
    heads=4,
    key_heads=2,
    head_dim=8,
    vocabulary=40,
    draft_vocabulary=20,
    taps=(1, 3, 5),
    theta=100.0,
)


def head_of(config: Eagle3Config, seed: int = 0) -> Eagle3:
    """With random weights; it says every second id."""
    torch.manual_seed(seed)
    head = Eagle3(config).eval()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    own = torch.arange(config.draft_vocabulary)
    head.d2t.copy_(own * (config.vocabulary // config.draft_vocabulary) - own)
    return head


def nearly_bigram(folder: Path, context: int, words: dict[str, int] | None = None) -> tuple[str, str]:
    """Where a target is whose next token hangs on the last one mostly, and a head that knows nothing else."""
    made: Any = models.config("llama")
    made.eos_token_id, made.max_position_embeddings = None, context
    target = models.build(made, seed=3)
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(0.05)
    where = models.save(target, folder / "target", words)
    width = made.hidden_size
    shape = replace(
        CONFIG,
        hidden=width,
        heads=2,
        key_heads=2,
        head_dim=width // 2,
        vocabulary=made.vocab_size,
        draft_vocabulary=made.vocab_size,
        taps=(0, 1, 2),
        norm_before_residual=True,
    )
    save(_of_last_token(shape, target), folder / "head", where, with_embedding=True)
    return where, str(folder / "head")


@torch.no_grad()
def _of_last_token(shape: Eagle3Config, target: PreTrainedModel) -> Eagle3:
    """Each row attends to itself, by its embedding, and adds that to nothing."""
    head, eye = Eagle3(shape).eval(), torch.eye(shape.hidden)
    for parameter in (head.fc.weight, head.hidden_norm.weight, head.down_proj.weight):
        parameter.zero_()
    for projection, scale in ((head.q_proj, 3.0), (head.k_proj, 3.0), (head.v_proj, 1.0)):
        projection.weight.zero_()
        projection.weight[:, : shape.hidden] = scale * eye
    head.o_proj.weight.copy_(eye)
    for own, name in ((head.embed_tokens, models.EMBEDDING), (head.norm, "model.norm.weight"), (head.lm_head, OUTPUT)):
        own.weight.copy_(target.get_parameter(name))
    return head


def reader_of(head: Eagle3) -> OriginalEagle3:
    """The head as another reader has it, by way of the original format's files."""
    with TemporaryDirectory() as made:
        save(head, Path(made), "a target", with_embedding=True)
        original_of(Path(made), Path(made) / "original")
        return OriginalEagle3(Path(made) / "original")
