"""What GetModelInfo tells of a served model, drafter's or verifier's: its description, and its identity."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from specwire.core.model import ModelInfo
from specwire.v1 import common_pb2

# Characters of a digest that are shown: enough to tell two apart.
SHOWN_HEX = 12


@dataclass(frozen=True, slots=True)
class Identity:
    """What decides a model's texts, and their ends. Services with equal ones may go on with each other's sessions.

    weights: over weights, configuration, dtype and quantization. vocabulary, tokenizer: of the ids and of the text that
    they stand for. The number of ids follows from these. eos_ids: rising.

    Left out is what only rounds (runtime, device, kernel, dtype of keys and values, batch, ranks, deterministic): the
    continuation is then another valid one. The context is, too: a session has a limit of its own, and is given to
    services that hold as much. So are name and chat template: a session begins with tokens.
    """

    weights: str
    vocabulary: str
    tokenizer: str
    eos_ids: tuple[int, ...]

    @classmethod
    def of(cls, info: common_pb2.GetModelInfoResponse) -> Identity:
        eos_ids = tuple(sorted(set(info.eos_ids)))
        return cls(info.weights_fingerprint, info.vocabulary_fingerprint, info.tokenizer_hash, eos_ids)

    @property
    def digest(self) -> str:
        """SHA-256 (hex) over all of it."""
        parts = [self.weights, self.vocabulary, self.tokenizer, self.eos_ids]
        return hashlib.sha256(json.dumps(parts, separators=(",", ":")).encode()).hexdigest()

    def beside(self, other: Identity) -> tuple[str, str]:
        """For people: in what this one differs, and what the other one has there; both empty where they are equal."""
        pairs = [(name, *each) for name, *each in zip(NAMES, self._shown, other._shown, strict=True)]
        unequal = [(name, ours, theirs) for name, ours, theirs in pairs if ours != theirs]
        ours = " and ".join(f"{name} {shown}" for name, shown, _ in unequal)
        return ours, " and ".join(shown for _, _, shown in unequal)

    @property
    def _shown(self) -> tuple[str, ...]:
        eos_ids = f"[{', '.join(map(str, self.eos_ids))}]"
        return self.weights[:SHOWN_HEX], self.vocabulary[:SHOWN_HEX], self.tokenizer[:SHOWN_HEX], eos_ids


# Names of the identity's parts, in their order.
NAMES = ("weights", "vocabulary", "tokenizer", "EOS ids")


def model_info_to_wire(
    info: ModelInfo, slots: int, kv_bytes: int = 0, token_text: int = common_pb2.TOKEN_TEXT_UNSPECIFIED
) -> common_pb2.GetModelInfoResponse:
    """The whole description, tokenizer included, without forward times.

    token_text: of the tokenizer, as `specwire.text.vocabulary_map.Convention` has it.
    """
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
        cores=core_numbers(),
        slots=slots,
        kv_bytes=kv_bytes,
        token_text=cast("common_pb2.TokenText", token_text),
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


def described(info: common_pb2.GetModelInfoResponse) -> common_pb2.GetModelInfoResponse:
    """The description without the tokenizer, which clients do not need, and the host, which they must not see."""
    copy = common_pb2.GetModelInfoResponse()
    copy.CopyFrom(info)
    copy.ClearField("tokenizer_json")
    copy.ClearField("host_id")
    copy.ClearField("cores")
    return copy


# ----------------------------------------------------------------------------------------------------------------------
# Which machine this is.

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_id() -> str:
    """Equal for two processes exactly if they run on one machine, since one boot: they share its clock.

    A hash, so that it tells a remote peer nothing. Containers of one machine count as different hosts by their names.
    """
    try:
        boot = BOOT_ID.read_text().strip()
    except OSError:  # not Linux: the name alone has to do
        boot = ""
    return hashlib.sha256(f"{boot}\0{socket.gethostname()}".encode()).hexdigest()[:32]


def core_numbers() -> list[int]:
    """Which cores this thread may use; none where the system does not place threads."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
