"""From what `--heads` names to a head for a target that is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from specwire.core.model import OPENVINO, ModelError, ModelInfo
from specwire.lm.heads import eagle3, medusa, mtp
from specwire.lm.heads.eagle3 import Eagle3, Eagle3Config, Eagle3Runner, Fuse
from specwire.lm.heads.files import CONFIG, read_config, tensor_files
from specwire.lm.heads.layer import DEFAULT_ROPE, Apart, rotations
from specwire.lm.heads.medusa import MedusaRunner
from specwire.lm.heads.mtp import MtpRunner
from specwire.lm.heads.slots import Head, waiting_bytes
from specwire.lm.linear import LinearWeights, weights_of
from specwire.lm.model_config import CausalModel, is_recurrent
from specwire.lm.runners.decoder import Model
from specwire.lm.runners.llama import MODEL_TYPES, Unsuited, rotations_of

# Makes a head over so many slots of so many positions, whose keys and values have a dtype, beside a runtime's target.
HeadFactory = Callable[[int, int, torch.dtype, str], Head]


class LoadedHead(NamedTuple):
    """taps: of the target, see `specwire.lm.runners.decoder.Decoder`. make: makes it over slots. width: of features.
    kept: numbers that it keeps of each position that it read. fuse: what it reads of features, if OpenVINO computes it,
    too; None where torch always does.
    """

    taps: tuple[int, ...]
    make: HeadFactory
    width: int
    kept: int = 0
    fuse: nn.Module | None = None

    def slot_bytes(self, context: int, dtype: torch.dtype) -> int:
        """What it needs of memory for one text, with features that wait to be read."""
        return context * self.kept * dtype.itemsize + waiting_bytes(self.width)


def load_head(spec: str, target: CausalModel, info: ModelInfo) -> LoadedHead:
    """The head in the directory `spec`, whose kind its config.json or its tensors tell. ModelError, which names file
    and key or tensor, for one that cannot be served, and for one of another target.
    """
    folder = Path(spec).expanduser()
    whole = read_config(folder)
    if is_recurrent(target.config) and mtp.style_of(tensor_files(folder)) is None:
        kind = target.config.model_type
        raise ModelError(f"heads: {folder}: beside the recurrent layers of {kind} models only MTP layers are served")
    if medusa.kind_of(whole) is not None:
        return _medusa(folder, whole, target, info)
    if eagle3.described(whole):
        return _eagle3(folder, target, info)
    names = tensor_files(folder)
    style = mtp.style_of(names)
    if style is not None:
        return _mtp(folder, whole, style, target, info)
    if names and eagle3.FUSED not in names:
        raise ModelError(f"heads: {folder}: holds neither an EAGLE-3, Medusa or Hydra head nor MTP layers")
    return _eagle3(folder, target, info)


def _medusa(folder: Path, whole: dict[str, Any], target: CausalModel, info: ModelInfo) -> LoadedHead:
    config: Any = target.config.get_text_config()
    _check(folder, info, "vocab_size", whole.get("vocab_size"), config.vocab_size)
    _check(folder, info, "hidden_size", whole.get("hidden_size"), config.hidden_size)
    heads = medusa.load(folder, whole, config.num_hidden_layers, _embedding_of(target), info.vocabulary)
    _check_ids(folder, info, heads.ids)
    norm = _last_norm(target, folder / CONFIG) if heads.config.normed else None

    def make(_slots: int, _context: int, dtype: torch.dtype, runtime: str) -> Head:
        if runtime != OPENVINO:
            return MedusaRunner(medusa.packed(heads, dtype), norm, dtype)
        # An extra, and slow to import.
        from specwire.lm.heads.openvino_heads import MedusaOpenvino

        return MedusaOpenvino(heads)

    fuse = nn.Sequential(*[] if norm is None else [norm], Apart(1, config.hidden_size))
    return LoadedHead(heads.config.taps, make, config.hidden_size, fuse=fuse)


def _last_norm(target: CausalModel, path: Path) -> nn.Module:
    norm = getattr(target.base_model, "norm", None)
    if not isinstance(norm, nn.Module):
        raise ModelError(f"heads: {path}: is of a target with a last norm, which a {type(target).__name__} lacks")
    return norm


def _eagle3(folder: Path, target: CausalModel, info: ModelInfo) -> LoadedHead:
    head, device = _read_eagle3(folder, target, info), _embedding_of(target).device
    told = head.config

    def make(slots: int, context: int, dtype: torch.dtype, runtime: str) -> Head:
        turns = None if told.rope is None else rotations_of(target, context, told.head_dim)
        if runtime != OPENVINO:
            return Eagle3Runner(head, info.vocabulary, slots, context, dtype, turns, device)
        # An extra, and slow to import.
        from specwire.lm.heads.openvino_heads import Eagle3Openvino

        return Eagle3Openvino(head, info.vocabulary, slots, context, turns)

    return LoadedHead(told.taps, make, told.fused, told.kept, Fuse(head))


def _read_eagle3(folder: Path, target: CausalModel, info: ModelInfo) -> Eagle3:
    """A head that is of this target."""
    config: Any = target.config.get_text_config()
    told = Eagle3Config.read(folder, config.num_hidden_layers)
    _check(folder, info, "vocab_size", told.vocabulary, config.vocab_size)
    _check(folder, info, "target_hidden_size", told.target_hidden or told.hidden, config.hidden_size)
    if told.rope is not None:
        _check_rotation(folder, told, target)
    head = eagle3.load(folder, config.num_hidden_layers, _embedding_of(target))
    _check_ids(folder, info, head.target_ids(torch.arange(told.draft_vocabulary, device=head.d2t.device)))
    return head


def _embedding_of(target: CausalModel) -> torch.Tensor:
    embedding: torch.Tensor = target.get_input_embeddings().get_parameter("weight")
    return embedding.detach()


def _check_rotation(folder: Path, told: Eagle3Config, target: CausalModel) -> None:
    """A rotation of another kind than the default one is served where it is the target's."""
    own, given = told.rope or {}, getattr(target.config.get_text_config(), "rope_parameters", None) or {}
    try:
        if own != {key: each for key, each in given.items() if each is not None and key != "partial_rotary_factor"}:
            raise Unsuited("with other numbers")
        rotations_of(target, 1, told.head_dim)
    except Unsuited as reason:
        kind = own.get("rope_type")
        message = f"rope_type: {kind} is served only where it is the target's rotation, which is not so: {reason}"
        raise ModelError(f"{folder / CONFIG}: {message}") from None


def _mtp(folder: Path, whole: dict[str, Any], style: mtp.MtpStyle, target: CausalModel, info: ModelInfo) -> LoadedHead:
    config: Any = target.config.get_text_config()
    if config.model_type not in MODEL_TYPES | mtp.ZERO_CENTRED:
        raise ModelError(f"heads: a {info.architecture} is not computed by a runner that tells its features")
    own = mtp.MtpConfig.read(folder, whole)
    _check(folder, info, "vocab_size", own.vocabulary, config.vocab_size)
    _check(folder, info, "hidden_size", own.hidden, config.hidden_size)
    _check(folder, info, "num_hidden_layers", own.layers, config.num_hidden_layers)
    layer, last = mtp.load(folder, style, own), target.get_output_embeddings()
    weight, bias = weights_of(last)
    output = LinearWeights(weight[: info.vocabulary], None if bias is None else bias[: info.vocabulary])
    embedding, norm = (target.get_parameter(f"model.{name}.weight").detach() for name in ("embed_tokens", "norm"))
    if config.model_type in mtp.ZERO_CENTRED:
        norm = 1 + norm.float()

    def make(slots: int, context: int, dtype: torch.dtype, runtime: str) -> Head:
        beside = Model(embedding, [], norm, output, _rotations(folder, own, target, context))
        if runtime != OPENVINO:
            return MtpRunner(layer, beside, slots, context, dtype)
        # An extra, and slow to import.
        from specwire.lm.heads.openvino_heads import MtpOpenvino

        return MtpOpenvino(layer, beside, slots, context)

    return LoadedHead((config.num_hidden_layers,), make, own.hidden, own.kept, mtp.told_of(layer, norm))


def _rotations(folder: Path, own: mtp.MtpConfig, target: CausalModel, context: int) -> torch.Tensor:
    """The head's, or the target's where it is of another kind than the default one."""
    if own.rope == DEFAULT_ROPE:
        return rotations(context, own.head_dim, own.turned, own.theta)
    rope: dict[str, Any] = getattr(target.config, "rope_parameters", None) or {}
    try:
        if rope.get("rope_type") != own.rope:
            raise Unsuited(f"the target's is {rope.get('rope_type')}")
        return rotations_of(target, context, own.head_dim)
    except Unsuited as reason:
        raise ModelError(f"{folder / CONFIG}: rope_type: {own.rope} is not served in MTP layers: {reason}") from None


def _check(folder: Path, info: ModelInfo, name: str, given: int | None, needed: int) -> None:
    """A head is of this target, by what its file tells."""
    if given not in (None, needed):
        raise ModelError(f"heads: {folder}: {name} is {given}, and {info.name} needs {needed}")


def _check_ids(folder: Path, info: ModelInfo, ids: torch.Tensor) -> None:
    """Output layers are often longer than the vocabulary, but some of what a head says must be tokens."""
    if not bool((ids < info.vocabulary).any()):
        raise ModelError(f"heads: {folder}: says none of the {info.vocabulary} tokens of {info.name}")
