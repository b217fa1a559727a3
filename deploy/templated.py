"""A conversation as a model's chat template writes it. Needs the extra http, for Jinja."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deploy.conversation import Message
from deploy.options import StackError
from orchestrator.http.templates import ChatTemplate, TemplateInvalid


class Templated:
    """A `deploy.conversation.Style`. eos_ids: of the model; of several nobody here knows which one ended an answer."""

    stops: Sequence[str] = ()

    def __init__(self, source: str, special_tokens: Mapping[str, str], eos_ids: Sequence[int]) -> None:
        """Raises StackError."""
        try:
            self._template = ChatTemplate(source, special_tokens)
        except TemplateInvalid as error:
            raise StackError(str(error)) from None
        self.ending = special_tokens.get("eos_token", "") if len(eos_ids) == 1 else ""

    def prompt(self, messages: Sequence[Message]) -> str:
        """InvalidParameter where the template refuses the messages."""
        return self._template.render(messages, True, {})
