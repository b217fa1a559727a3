"""What the HTTP endpoints share: the orchestrator behind them, who calls, the served model and its template."""

from __future__ import annotations

import time
from dataclasses import dataclass

from orchestrator.generating import Generating
from orchestrator.http.errors import INVALID, Failure
from orchestrator.http.templates import ChatTemplate, TemplateInvalid
from orchestrator.sessions import Orchestrator
from orchestrator.target import Target
from specwire.text.tokens import TokenBytes


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


class Service:
    """chat_template: instead of the model's own; "" takes that."""

    def __init__(self, orchestrator: Orchestrator, chat_template: str = "") -> None:
        self.orchestrator = orchestrator
        self.generating = Generating(orchestrator)
        self.started = int(time.time())
        self._chat_template = chat_template
        self._served: Served | None = None

    def served(self, model: str | None = None) -> Served:
        """The served model, which must be called `model` where that is given.

        Raises:
            StatusError: UNAVAILABLE, no verifier has said yet what it serves.
            Failure: 404, another model was asked for.
        """
        target = self.orchestrator.pool.require_target()
        if self._served is None or self._served.target is not target:
            self._served = self._described(target)
        if model is not None and model != self._served.name:
            message = f"model: {model!r} is not served here; {self._served.name!r} is"
            raise Failure(404, message, INVALID, "model", "model_not_found")
        return self._served

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
