"""From what `--heads` names to a head for a target that is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from specwire.core.model import ModelError, ModelInfo
from specwire.lm.heads import eagle3, medusa
from specwire.lm.heads.eagle3_runner import Eagle3Runner
from specwire.lm.heads.files import CONFIG, read_config
from specwire.lm.heads.medusa import MedusaRunner
from specwire.lm.heads.slots import Head


class LoadedHead(NamedTuple):
    """taps: of the target, see `specwire.lm.runners.decoder.Decoder`. over: the head over slots of so many positions,
    whose keys and values have a dtype.
    """

    taps: tuple[int, ...]
    over: Callable[[int, int, torch.dtype], Head]


def load_head(spec: str, target: PreTrainedModel, info: ModelInfo) -> LoadedHead:
    """The head in the directory `spec`, whose kind its config.json tells. ModelError, which names file and key, for one
    that cannot be served, and for one of another target.
    """
    folder = Path(spec).expanduser()
    whole = read_config(folder)
    config: Any = target.config.get_text_config()
    embedding: torch.Tensor = target.get_input_embeddings().get_parameter("weight").detach()
    if medusa.kind_of(whole) is not None:
        _check(spec, info, config, whole.get("vocab_size"), ("hidden_size", whole.get("hidden_size")))
        heads = medusa.load(folder, whole, config.num_hidden_layers, embedding, info.vocabulary)
        norm = _last_norm(target, folder / CONFIG) if heads.config.normed else None
        return LoadedHead(heads.config.taps, lambda _slots, _context, dtype: MedusaRunner(heads, norm, dtype))
    head = eagle3.load(folder, config.num_hidden_layers, embedding)
    width = head.config.target_hidden or head.config.hidden
    _check(spec, info, config, head.config.vocabulary, ("target_hidden_size", width))
    return LoadedHead(head.config.taps, lambda slots, context, dtype: Eagle3Runner(head, slots, context, dtype))


def _check(spec: str, info: ModelInfo, config: Any, vocabulary: int | None, width: tuple[str, int | None]) -> None:
    """A head is of this target, by what its file tells."""
    for name, given, needed in (("vocab_size", vocabulary, config.vocab_size), (*width, config.hidden_size)):
        if given not in (None, needed):
            raise ModelError(f"heads: {spec}: {name} is {given}, and {info.name} needs {needed}")


def _last_norm(target: PreTrainedModel, path: Path) -> nn.Module:
    norm = getattr(target.base_model, "norm", None)
    if not isinstance(norm, nn.Module):
        raise ModelError(f"heads: {path}: is of a target with a last norm, which a {type(target).__name__} lacks")
    return norm
