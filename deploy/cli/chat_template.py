"""A conversation as a model's chat template writes it. Needs the extra http, for Jinja; the rest of `chat` does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deploy.cli.chat import Message
from deploy.stack.options import StackError
from orchestrator.http.templates import Renderer, TemplateInvalid
from specwire.core.invalid import InvalidParameter
from specwire.text.sandbox import Busy


class Templated:
    """A `deploy.cli.chat.Style`. eos_ids: of the model; of several nobody here knows which one ended an answer."""

    stops: Sequence[str] = ()

    def __init__(self, source: str, special_tokens: Mapping[str, str], eos_ids: Sequence[int]) -> None:
        self._renderer = Renderer()
        self._template = self._renderer.template(source, special_tokens)
        self.ending = special_tokens.get("eos_token", "") if len(eos_ids) == 1 else ""

    async def check(self) -> None:
        """Raises StackError."""
        try:
            await self._template.compile()
        except (TemplateInvalid, Busy) as error:
            raise StackError(str(error)) from None

    async def prompt(self, messages: Sequence[Message]) -> str:
        """InvalidParameter where the template refuses the messages, or takes too much for them."""
        try:
            return await self._template.render(messages, True, {})
        except (TemplateInvalid, Busy) as error:
            raise InvalidParameter("messages", str(error)) from None

    async def close(self) -> None:
        self._template.close()
        await self._renderer.stop()
