"""What drafting touches of vLLM by name: its configuration, its ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specwire.core.model import ModelError
from specwire.lm.runners.vllm import check_version, device_name, tested
from specwire.text.tokenizer import vocabulary_fingerprint, vocabulary_map

TOKENIZER = "tokenizer.json"


class UnknownEngine(RuntimeError):
    """A vLLM that was not tested, or that lacks what is needed of it."""


@dataclass(frozen=True, slots=True)
class VllmTarget:
    """What drafting has to know of a vLLM server.

    vocabulary: number of ids. context: longest text in tokens. most: draft tokens that a step may test of a request.
    leads: of the worker's processes, this is the one whose proposals count. device: on which vLLM computes.
    """

    model: str
    vocabulary: int
    vocabulary_fingerprint: str
    context: int
    most: int
    leads: bool
    device: str


def describe(vllm_config: Any) -> VllmTarget:
    """Read a VllmConfig.

    Raises:
        UnknownEngine: says what is missing, and which versions were tested.
    """
    try:
        check_version()
        model, speculative = vllm_config.model_config, vllm_config.speculative_config
        width = int(model.get_vocab_size())
        tokens = {at: token for at, token in vocabulary_map(_tokenizer(model), width).items() if at < width}
        return VllmTarget(
            Path(str(model.model)).name,
            min(max(tokens) + 1, width),
            vocabulary_fingerprint(tokens),
            int(model.max_model_len),
            int(speculative.num_speculative_tokens),
            _leads(vllm_config.parallel_config),
            device_name(str(vllm_config.device_config.device_type)),
        )
    except ModelError as error:
        raise UnknownEngine(f"specwire.vllm: {error}") from error
    except (AttributeError, ImportError, ValueError) as error:
        raise UnknownEngine(f"specwire.vllm needs of vLLM what this one lacks: {error}; {tested()}") from error


def _tokenizer(model: Any) -> bytes:
    """The tokenizer's JSON; empty where vLLM was started without one."""
    if model.skip_tokenizer_init:
        return b""
    file = Path(str(model.tokenizer)) / TOKENIZER
    if file.is_file():
        return file.read_bytes()
    from transformers import AutoTokenizer

    loaded: Any = AutoTokenizer.from_pretrained(model.tokenizer, revision=model.tokenizer_revision)
    text: str = loaded.backend_tokenizer.to_str()
    return text.encode()


def _leads(parallel: Any) -> bool:
    """Every tensor-parallel rank has a proposer; the scheduler takes what the first one proposes."""
    if parallel.tensor_parallel_size == 1:
        return True
    from vllm.distributed import get_tensor_model_parallel_rank

    return bool(get_tensor_model_parallel_rank() == 0)
