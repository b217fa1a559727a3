"""A conversation: how its messages become a prompt, and what of it the service already has.

Each turn is a session. Where the text of the session before, prompt and output, is just how the whole conversation's
prompt begins, the turn names that session as its parent and sends the rest only. Else it sends the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from specwire.client import Completion
from specwire.core.limits import FinishReason

Message = dict[str, Any]
USER, ANSWER = "\nUser:", "\nAssistant:"


class Style(Protocol):
    """How a model wants to see a conversation.

    stops: strings that end an answer. ending: the text of the token that ends one; "" if the prompt does not have it.
    """

    stops: Sequence[str]
    ending: str

    async def prompt(self, messages: Sequence[Message]) -> str:
        """The whole, up to where the answer begins."""
        ...

    async def close(self) -> None:
        """It is not used any more."""
        ...


class Plain:
    """For a model without a template: names before what each one says."""

    stops: Sequence[str] = (USER,)
    ending = ""
    NAMES = {"user": USER, "assistant": ANSWER}  # noqa: RUF012  # a constant

    async def prompt(self, messages: Sequence[Message]) -> str:
        said = "".join(self._said(message) for message in messages)
        return (said + ANSWER).removeprefix("\n")

    async def close(self) -> None:
        pass

    def _said(self, message: Message) -> str:
        match message["role"]:
            case "system":
                return f"{message['content']}\n"
            case "user":
                return f"{USER} {message['content']}"
        return f"{ANSWER}{message['content']}"


@dataclass(frozen=True, slots=True)
class Turn:
    """What to send: `prompt` behind the session `parent` where that is not "". `whole` is all of it."""

    prompt: str
    parent: str
    whole: str


class Conversation:
    """Invariant: `_known` is the text of all tokens of the session `_session`, or both are ""."""

    def __init__(self, style: Style, system: str = "") -> None:
        self.style = style
        self._messages: list[Message] = []
        self._session = self._known = ""
        self.clear(system)

    def clear(self, system: str) -> None:
        """Begin anew."""
        self._messages = [{"role": "system", "content": system}] if system else []
        self.forget_session()

    def forget_session(self) -> None:
        """The service has lost it."""
        self._session = self._known = ""

    async def turn(self, text: str) -> Turn:
        """The turn in which the user says `text`; it is no part of the conversation until it has an answer."""
        whole = await self.style.prompt([*self._messages, {"role": "user", "content": text}])
        if self._session and whole.startswith(self._known) and len(whole) > len(self._known):
            return Turn(whole[len(self._known) :], self._session, whole)
        return Turn(whole, "", whole)

    def answered(self, turn: Turn, text: str, answer: str, completion: Completion | None, decoded: int) -> None:
        """The answer as it was shown.

        Args:
            completion: None where nobody heard the session's end.
            decoded: code points of all of the session's tokens, those of a stop string included.
        """
        self._messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
        self.forget_session()
        ending = None if completion is None else self._ending(completion.finish_reason, decoded - len(answer))
        if completion is not None and ending is not None:
            self._session, self._known = completion.session_id, turn.whole + answer + ending

    def _ending(self, reason: FinishReason, behind: int) -> str | None:
        """The text of the session's tokens behind the answer, `behind` code points of it; None if nobody knows."""
        match reason:
            case FinishReason.EOS:
                return self.style.ending if self.style.ending and not behind else None
            case FinishReason.STOP_STRING:
                return next((stop for stop in self.style.stops if len(stop) == behind), None)
            case FinishReason.LENGTH | FinishReason.CANCELLED:
                return "" if not behind else None
        return None
