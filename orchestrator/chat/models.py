"""How the served models chat: each one's template, and the family that it tells of. Both doors have the same."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.admission import Aside
from orchestrator.chat.answer import AnswerForm, ChatPrompt
from orchestrator.chat.talk import Talk
from orchestrator.chat.templates import RemoteTemplate, Renderer, TemplateInvalid, installed
from orchestrator.peers.models import Target
from orchestrator.pool import Pool
from specwire.core.invalid import InvalidParameter
from specwire.rpc.model_info import Identity
from specwire.text.sandbox import Busy
from specwire.text.tool_calls.formats import ChatFamily

INSTEAD = "complete a text instead (/v1/completions), or start the service with --chat-template FILE"


class CannotChat(InvalidParameter):
    """The model has no template that could be used. code: of OpenAI's errors."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__("messages", f"{message}; {INSTEAD}")
        self.code = code


@dataclass(frozen=True, slots=True)
class ChatModel:
    """template: None where the model has none. family: what that tells of the model."""

    target: Target
    template: RemoteTemplate | None
    family: ChatFamily

    async def prompt(self, talk: Talk, aside: Aside) -> str:
        """The talk as the model's chat template writes it. aside: of the request that it is of.

        Raises:
            InvalidParameter: it refuses them, fails on them, or takes too long or too much memory.
            CannotChat: the model has none, or one that does not compile.
            Busy: too many wait.
        """
        name = self.target.info.model
        if not installed():
            raise CannotChat("chats need Jinja here (pip install 'specwire[http]')", "no_chat_template")
        if self.template is None:
            raise CannotChat(f"model {name!r} has no chat template, so it cannot chat", "no_chat_template")
        try:
            messages, more = await aside(talk.told, self.family)
            return talk.prompt(await self.template.render(messages, talk.asks, more))
        except InvalidParameter as error:
            message = str(error).removeprefix(f"{error.field}: ")
            raise InvalidParameter(error.field, f"model {name!r}: {message}") from None
        except TemplateInvalid as error:
            raise CannotChat(f"model {name!r} cannot chat: {error}", "invalid_chat_template") from None

    async def asked(self, talk: Talk, aside: Aside) -> ChatPrompt:
        """What a session is asked for. Raises as `prompt`."""
        prompt = await self.prompt(talk, aside)
        form = AnswerForm.of(self.family, talk, prompt)
        return ChatPrompt(prompt, await talk.tools.constraint(self.family, form.thinking), form)


class ChatModels:
    """One object for all callers of an orchestrator. Nothing is started before somebody chats.

    chat_template: instead of the models' own; tool_format: of `FORMATS`; "" takes the models', as it is found.
    """

    def __init__(self, pool: Pool, chat_template: str = "", tool_format: str = "") -> None:
        self._pool = pool
        self._chat_template = chat_template
        self._tool_format = tool_format
        self._known: dict[Identity, ChatModel] = {}
        self._renderer = Renderer()

    def of(self, target: Target) -> ChatModel:
        known = self._known.get(target.identity)
        if known is None or known.target != target:
            versions = self._pool.models
            for gone in [each for each in self._known if versions.version(each) is None]:
                self._close(self._known.pop(gone))
            self._known[target.identity] = self._described(target, known)
        return self._known[target.identity]

    def source(self, target: Target) -> str:
        """Of the template that its chats are written by; empty where there is none."""
        return self._chat_template or target.info.chat_template

    def _described(self, target: Target, known: ChatModel | None) -> ChatModel:
        """`known`: the same version, as it was described before."""
        if known is not None and _template_of(known.target) == _template_of(target):
            return ChatModel(target, known.template, known.family)
        if known is not None:
            self._close(known)
        source = self.source(target)
        template = self._renderer.template(source, target.info.special_tokens) if source else None
        return ChatModel(target, template, ChatFamily.of(source, self._tool_format))

    def _close(self, model: ChatModel) -> None:
        if model.template is not None:
            model.template.close()

    async def check_template(self) -> None:
        """Raises TemplateInvalid: of --chat-template it is known at start, not at the first chat."""
        if self._chat_template:
            template = self._renderer.template(self._chat_template, {})
            try:
                await template.compile()
            except Busy:
                raise TemplateInvalid("the chat template was not compiled in time") from None
            finally:
                template.close()

    async def stop(self) -> None:
        """Idempotent."""
        for model in self._known.values():
            self._close(model)
        await self._renderer.stop()


def _template_of(target: Target) -> tuple[str, dict[str, str]]:
    return target.info.chat_template, dict(target.info.special_tokens)
