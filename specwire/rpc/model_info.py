"""A model's description on the wire, the same for drafters and verifiers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Protocol

from specwire.rpc.host import host_id
from specwire.v1 import common_pb2


class Described(Protocol):
    """What is told of a model: `specwire.lm.ModelInfo`, which needs torch where this package does not."""

    @property
    def name(self) -> str: ...

    @property
    def architecture(self) -> str: ...

    @property
    def vocabulary(self) -> int: ...

    @property
    def context(self) -> int: ...

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...

    @property
    def device(self) -> str: ...

    @property
    def runtime(self) -> str: ...

    @property
    def quantization(self) -> str: ...

    @property
    def deterministic(self) -> bool: ...

    @property
    def weights_fingerprint(self) -> str: ...

    @property
    def vocabulary_fingerprint(self) -> str: ...

    @property
    def tokenizer_json(self) -> bytes: ...

    @property
    def chat_template(self) -> str: ...

    @property
    def special_tokens(self) -> Mapping[str, str]: ...


def model_info_to_wire(info: Described, slots: int, kv_bytes: int = 0) -> common_pb2.GetModelInfoResponse:
    """The whole description, tokenizer included, without forward times."""
    return common_pb2.GetModelInfoResponse(
        model=info.name,
        architecture=info.architecture,
        vocabulary=info.vocabulary,
        context=info.context,
        eos_ids=info.eos_ids,
        dtype=info.dtype,
        device=info.device,
        runtime=info.runtime,
        quantization=info.quantization,
        deterministic=info.deterministic,
        weights_fingerprint=info.weights_fingerprint,
        vocabulary_fingerprint=info.vocabulary_fingerprint,
        tokenizer_hash=hashlib.sha256(info.tokenizer_json).hexdigest(),
        tokenizer_json=info.tokenizer_json,
        chat_template=info.chat_template,
        special_tokens=info.special_tokens,
        host_id=host_id(),
        slots=slots,
        kv_bytes=kv_bytes,
    )


def answer(
    whole: common_pb2.GetModelInfoResponse, request: common_pb2.GetModelInfoRequest
) -> common_pb2.GetModelInfoResponse:
    """`whole`, without the tokenizer if the caller has it."""
    if request.known_tokenizer_hash != whole.tokenizer_hash:
        return whole
    short = common_pb2.GetModelInfoResponse()
    short.CopyFrom(whole)
    short.ClearField("tokenizer_json")
    return short
