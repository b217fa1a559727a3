"""From what `--heads` names to a head for a target that is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from specwire.core.model import ModelError, ModelInfo
from specwire.lm.heads import eagle3
from specwire.lm.heads.eagle3_runner import Eagle3Runner
from specwire.lm.heads.slots import Head


class LoadedHead(NamedTuple):
    """taps: of the target, see `specwire.lm.runners.decoder.Decoder`. over: the head over slots of so many positions,
    whose keys and values have a dtype.
    """

    taps: tuple[int, ...]
    over: Callable[[int, int, torch.dtype], Head]


def load_head(spec: str, target: PreTrainedModel, info: ModelInfo) -> LoadedHead:
    """The head in the directory `spec`. ModelError, which names file and key, for one that cannot be served, and for
    one of another target.
    """
    config: Any = target.config.get_text_config()
    embedding: torch.Tensor = target.get_input_embeddings().get_parameter("weight").detach()
    head = eagle3.load(Path(spec).expanduser(), config.num_hidden_layers, embedding)
    for name, given, needed in (
        ("vocab_size", head.config.vocabulary, config.vocab_size),
        ("target_hidden_size", head.config.target_hidden or head.config.hidden, config.hidden_size),
    ):
        if given != needed:
            raise ModelError(f"heads: {spec}: {name} is {given}, and {info.name} needs {needed}")
    return LoadedHead(head.config.taps, lambda slots, context, dtype: Eagle3Runner(head, slots, context, dtype))
