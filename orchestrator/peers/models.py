"""The models that an orchestrator serves, with their tokenizers."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import zlib
from collections.abc import Collection
from dataclasses import dataclass

import grpc
import grpc.aio
from tokenizers import Tokenizer

from orchestrator.store import SessionRecord
from specwire.core.invalid import InvalidParameter
from specwire.rpc.errors import StatusError
from specwire.rpc.model_info import SHOWN_HEX, Identity
from specwire.text.tokenizer import TokenizerError, load_tokenizer, longest_token
from specwire.v1 import common_pb2, draft_pb2

Info = common_pb2.GetModelInfoResponse


# ----------------------------------------------------------------------------------------------------------------------
# The tokenizers of the models that are served, each read once, however many verifiers have it.

# The hash of a model without one.
NO_TOKENIZER = hashlib.sha256(b"").hexdigest()
# Bytes from which reading one takes long enough for sessions to feel it.
LONG_TEXT = 1 << 16


@dataclass(frozen=True, slots=True)
class ReadTokenizer:
    """longest: the most bytes of text that one token may stand for. packed: its JSON, by zlib, for drafters."""

    tokenizer: Tokenizer
    longest: int
    packed: bytes

    @classmethod
    def of(cls, text: bytes) -> ReadTokenizer:
        """Raises TokenizerError."""
        tokenizer = load_tokenizer(text)
        return cls(tokenizer, longest_token(tokenizer), zlib.compress(text))


class Tokenizers:
    """By the hash of their text. `latest`: of the one that was read last; "" before any was."""

    def __init__(self) -> None:
        self.latest = ""
        self._read: dict[str, ReadTokenizer | TokenizerError] = {}
        # Hashes that another text came with.
        self._wrong: set[str] = set()

    async def take(self, info: common_pb2.GetModelInfoResponse) -> None:
        """Take the tokenizer out of a description and read it, if it is new, in a thread."""
        text, told = info.tokenizer_json, info.tokenizer_hash
        info.ClearField("tokenizer_json")
        if not text or told in self._read:
            return
        reading = asyncio.to_thread(_read, text, told) if len(text) > LONG_TEXT else None
        read = _read(text, told) if reading is None else await reading
        if read is not None:
            self._read[told] = read
            self.latest = told
        else:
            self._wrong.add(told)

    def of(self, info: common_pb2.GetModelInfoResponse) -> ReadTokenizer:
        """Raises TokenizerError."""
        read = self._read.get(info.tokenizer_hash)
        if read is None:
            if info.tokenizer_hash == NO_TOKENIZER:
                reason = "the model has none, or none that its server can make; the server's log says which"
            else:
                reason = "is another one than its hash says" if info.tokenizer_hash in self._wrong else "did not come"
            raise TokenizerError(f"tokenizer_json: {reason}")
        if isinstance(read, TokenizerError):
            raise read
        return read

    def known(self, told: str) -> ReadTokenizer | None:
        """The tokenizer with this hash, if it was ever here."""
        read = self._read.get(told)
        return read if isinstance(read, ReadTokenizer) else None


def _read(text: bytes, told: str) -> ReadTokenizer | TokenizerError | None:
    """None if its hash is not the stated one: nothing may be kept under another tokenizer's hash."""
    if hashlib.sha256(text).hexdigest() != told:
        return None
    try:
        return ReadTokenizer.of(text)
    except TokenizerError as error:
        return error


# ----------------------------------------------------------------------------------------------------------------------
# A model that an orchestrator serves.


@dataclass(frozen=True, slots=True)
class Target:
    """A model, as one of the verifiers describes it whose models are equal (`identity`).

    context: the most that one of them holds. context_now: likewise, of those that can be used at the moment.
    longest: the most bytes of text that one token may stand for. packed: the tokenizer's JSON, by zlib.
    """

    info: Info
    identity: Identity
    tokenizer: Tokenizer
    longest: int
    packed: bytes
    context: int
    context_now: int

    @classmethod
    def of(cls, info: Info, read: ReadTokenizer) -> Target:
        return cls(info, Identity.of(info), read.tokenizer, read.longest, read.packed, info.context, info.context)

    @property
    def most_prompt_bytes(self) -> int:
        return self.context * self.longest

    @property
    def vocabulary(self) -> draft_pb2.TargetVocabulary:
        """For a drafter that has another one."""
        return draft_pb2.TargetVocabulary(
            fingerprint=self.identity.vocabulary,
            tokenizer_zlib=self.packed,
            vocabulary=self.info.vocabulary,
            eos_ids=self.identity.eos_ids,
        )


def vocabulary_mismatch(target: Info, drafter: Info) -> str | None:
    """Why the drafter cannot draft for the target, or None if it can: its ids mean the same, or it can map them."""
    if target.vocabulary_fingerprint == drafter.vocabulary_fingerprint or maps_vocabulary(target, drafter):
        return None
    return (
        f"vocabulary mismatch: drafter {drafter.model} has {drafter.vocabulary_fingerprint[:12]} "
        f"({drafter.vocabulary} ids), target {target.model} has {target.vocabulary_fingerprint[:12]} "
        f"({target.vocabulary} ids); both need the same tokenizer, or tokens that stand for bytes"
    )


def maps_vocabulary(target: Info, drafter: Info) -> bool:
    """Whether the drafter can draft for another vocabulary, the target's."""
    return target.token_text == drafter.token_text == common_pb2.TOKEN_TEXT_BYTES


# ----------------------------------------------------------------------------------------------------------------------
# The models that an orchestrator serves: a target for each identity that a verifier has shown.
#
# `specwire.rpc.model_info.Identity` says which are equal. A session is pinned to the model that it began with.

logger = logging.getLogger(__name__)

# Seconds for which a model without a verifier stays known: one may come back.
KEPT_S = 600.0


def identity_of(record: SessionRecord) -> Identity:
    """Identity of the model that the session was begun with."""
    return Identity(
        record.weights_fingerprint, record.vocabulary_fingerprint, record.tokenizer_fingerprint, record.eos_ids
    )


class Models:
    """Several models side by side have different names. One name may have several *versions*, with other identities.

    A session is pinned to a version. The pool chooses which one new sessions get.

    Args:
        tokenizers: those of verifiers' descriptions.
    """

    def __init__(self, tokenizers: Tokenizers) -> None:
        self._tokenizers = tokenizers
        self._versions: dict[Identity, Target] = {}
        # Weights of all versions ever known: a session begun with one that is gone can still be read.
        self._weights: set[str] = set()
        self._missed: dict[Identity, float] = {}

    def learn(self, info: Info, versions: bool) -> str | None:
        """Add a verifier's model; returns why the verifier must not be used, or None.

        versions: the verifier may have another version of a model that is known by this name.
        """
        identity = Identity.of(info)
        if identity in self._versions:
            return None
        known = self.named(info.model)
        offered, served = identity.beside(known[-1].identity) if known else ("", "")
        if known and not versions:
            return f"serves {offered}, but sessions here are pinned to {served}"
        try:
            self._versions[identity] = Target.of(info, self._tokenizers.of(info))
        except TokenizerError as error:
            return str(error)
        self._weights.add(identity.weights)
        if known:
            logger.warning("another version of %s: %s rather than %s", info.model, offered, served)
        return None

    def all(self) -> list[Target]:
        return list(self._versions.values())

    def names(self) -> list[str]:
        return sorted({target.info.model for target in self._versions.values()})

    def named(self, name: str) -> list[Target]:
        """All versions, in the order in which they were first seen."""
        return [target for target in self._versions.values() if target.info.model == name]

    def version(self, identity: Identity) -> Target | None:
        return self._versions.get(identity)

    # Sessions that have begun

    def tokenizer_of(self, record: SessionRecord) -> Tokenizer:
        """The session's tokenizer, also long after its last verifier has left.

        Raises:
            StatusError: UNAVAILABLE, no verifier has said what it is; FAILED_PRECONDITION, its model was never here.
        """
        target = self._versions.get(identity_of(record))
        if target is not None:
            return target.tokenizer
        if not self._weights:
            raise StatusError(grpc.StatusCode.UNAVAILABLE, "no verifier has answered yet")
        weights, text = record.weights_fingerprint, record.tokenizer_fingerprint
        if weights not in self._weights:
            message = f"pinned to weights {weights[:SHOWN_HEX]}, which no verifier here has had"
            raise StatusError(grpc.StatusCode.FAILED_PRECONDITION, f"session_id: the session is {message}")
        read = self._tokenizers.known(text)
        if read is None:
            message = f"session_id: the session's text is of tokenizer {text[:SHOWN_HEX]}, which is not served here"
            raise StatusError(grpc.StatusCode.FAILED_PRECONDITION, message)
        return read.tokenizer

    def name_of(self, record: SessionRecord) -> str:
        """The present name of the session's model; "" if that is unknown."""
        target = self._versions.get(identity_of(record))
        return record.model if target is None else target.info.model

    # What requests may name

    def meant(self, name: str) -> str:
        """The name of the model that a request means by `name`; by "" the only one.

        Raises:
            StatusError: UNAVAILABLE, none is known yet; NOT_FOUND, this one is not.
            InvalidParameter: there are several, and none is named.
        """
        names = self.names()
        if not names:
            raise StatusError(grpc.StatusCode.UNAVAILABLE, "no verifier has answered yet")
        if name in names:
            return name
        listed = ", ".join(map(repr, names))
        if name:
            are = "is" if len(names) == 1 else "are"
            raise StatusError(grpc.StatusCode.NOT_FOUND, f"model: {name!r} is not served here; {listed} {are}")
        if len(names) > 1:
            raise InvalidParameter("model", f"must be named: {listed} are served here")
        return names[0]

    def sweep(self, present: Collection[Identity], now: float) -> None:
        """Forget models that no verifier has had for a while. present: those that verifiers have now."""
        for identity in list(self._versions):
            if identity in present:
                self._missed.pop(identity, None)
            elif now - self._missed.setdefault(identity, now) > KEPT_S:
                del self._versions[identity], self._missed[identity]
