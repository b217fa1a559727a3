"""What the HTTP endpoints share: the orchestrator behind them, who calls, the served model and its template."""

from __future__ import annotations

import time
from dataclasses import dataclass

import grpc

from orchestrator.generating import Generating
from orchestrator.http.bodies import most_body_bytes
from orchestrator.http.errors import INVALID, Failure
from orchestrator.http.templates import ChatTemplate, TemplateInvalid
from orchestrator.sessions import Orchestrator
from orchestrator.target import Target
from specwire.rpc.errors import StatusError
from specwire.text.tokens import TokenBytes
from specwire.v1 import generation_pb2 as pb

# Of the weights' own: enough to tell them apart.
FINGERPRINT_DIGITS = 12


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request, read whole. headers: names in lower case. path: what the route's placeholders stand for."""

    tenant: str
    body: bytes
    headers: dict[str, str]
    query: dict[str, str]
    path: dict[str, str]


@dataclass(frozen=True, slots=True)
class Served:
    """The model as HTTP's callers see it. template: None where it has none."""

    target: Target
    names: TokenBytes
    template: ChatTemplate | None

    @property
    def name(self) -> str:
        return self.target.info.model

    @property
    def fingerprint(self) -> str:
        """OpenAI's system_fingerprint: with another one the same seed may give another text."""
        return f"fp_{self.target.info.weights_fingerprint[:FINGERPRINT_DIGITS]}"


class Service:
    """chat_template: instead of the model's own; "" takes that."""

    def __init__(self, orchestrator: Orchestrator, chat_template: str = "") -> None:
        self.orchestrator = orchestrator
        self.generating = Generating(orchestrator)
        self.started = int(time.time())
        self._chat_template = chat_template
        self._served: dict[str, Served] = {}

    def served(self, model: str | None = None) -> Served:
        """What new sessions of the model get that is called so; of the only one where no name is given.

        Raises:
            StatusError: UNAVAILABLE, no verifier has said yet what it serves.
            InvalidParameter: there are several models, and none is named.
            Failure: 404, another model was asked for.
        """
        try:
            return self._of(self.orchestrator.pool.target_named(model or ""))
        except StatusError as error:
            if error.code is not grpc.StatusCode.NOT_FOUND:
                raise
            raise Failure(404, error.message, INVALID, "model", "model_not_found") from None

    async def served_for(self, request: pb.GenerateRequest, tenant: str) -> Served:
        """As `served`, of the model that the request names, or else its parent's."""
        if request.model or not request.parent:
            return self.served(request.model)
        return self._of(await self.generating.target_for(request, tenant))

    def all_served(self) -> list[Served]:
        """Every model, by rising name; at least one. Raises StatusError (UNAVAILABLE)."""
        pool = self.orchestrator.pool
        pool.require_target()
        return [self._of(target) for target in pool.targets()]

    @property
    def most_body_bytes(self) -> int:
        """Of one request: as was asked for, or what the largest context that is served may need."""
        contexts = [target.info.context for target in self.orchestrator.pool.targets()]
        return self.orchestrator.options.http_access.body or most_body_bytes(max(contexts, default=0))

    def _of(self, target: Target) -> Served:
        weights = target.info.weights_fingerprint
        if weights not in self._served:
            known = self.orchestrator.pool.models
            self._served = {each: served for each, served in self._served.items() if known.pinned(each) is not None}
            self._served[weights] = self._described(target)
        return self._served[weights]

    def _described(self, target: Target) -> Served:
        source = self._chat_template or target.info.chat_template
        template = ChatTemplate(source, target.info.special_tokens) if source else None
        return Served(target, TokenBytes(target.tokenizer), template)

    def template(self, served: Served) -> ChatTemplate:
        """Failure (400) where the model has none."""
        if served.template is None:
            message = (
                f"messages: model {served.name!r} has no chat template, so it cannot chat; "
                "use /v1/completions, or start the service with --chat-template FILE"
            )
            raise Failure(400, message, INVALID, "messages", "no_chat_template")
        return served.template


def check_template(source: str) -> None:
    """Raises TemplateInvalid: known at start, not at the first chat."""
    if source:
        ChatTemplate(source, {})


__all__ = ["Call", "Served", "Service", "TemplateInvalid", "check_template"]
