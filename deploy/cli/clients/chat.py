"""`specwire chat`: a conversation on a terminal, or with lines from a pipe.

Ctrl-C while an answer comes ends the answer; at the prompt it drops the line. Ctrl-D or /exit leaves.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.util
import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

import grpc

from deploy.cli.clients.generate import add_sampling_arguments, check_timeout, sampling_options, shown, summary
from deploy.cli.stack_address import StackAddress, add_address_arguments, explained, say_what_starts, stack_address_of
from deploy.cli.terminal import ProvisionalTail, dim, is_terminal, painter, wants_colour
from deploy.settings import PREFIX
from deploy.stack.options import StackError
from deploy.stack.processes import BlockingChild, environment
from orchestrator.chat.templates import Renderer, TemplateInvalid
from orchestrator.options import chat_template_of
from specwire.client import AsyncClient, Chunk, Completion, Finished, SpecwireError
from specwire.client.events import PartialCompletion
from specwire.client.requests import RequestOptions
from specwire.core.invalid import InvalidParameter
from specwire.core.messages import FinishReason
from specwire.options import STACK, words_of
from specwire.progress import LAST_LINE
from specwire.rpc.process import say, visible
from specwire.rpc.server_options import ANY_PORT
from specwire.text.sandbox import Busy

# ----------------------------------------------------------------------------------------------------------------------
# A conversation: how its messages become a prompt, and which part of it the service already has.
#
# Each turn is a session. Where the text of the session before, prompt and output, is just how the whole conversation's
# prompt begins, the turn names that session as its parent and sends the rest only. Else it sends the whole.

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
        """Close it: it is not used any more."""
        ...


class Plain:
    """Style of a model without a template: names before what each party says."""

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


class Templated:
    """Style of a model with a chat template. eos_ids: the model's; of several it is unknown which one ended."""

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
        """The turn in which the user says `text`; it joins the conversation once it has an answer."""
        whole = await self.style.prompt([*self._messages, {"role": "user", "content": text}])
        if self._session and whole.startswith(self._known) and len(whole) > len(self._known):
            return Turn(whole[len(self._known) :], self._session, whole)
        return Turn(whole, "", whole)

    def answered(self, turn: Turn, text: str, answer: str, completion: Completion | None, decoded: int) -> None:
        """The answer as it was shown.

        Args:
            completion: None where the session's end was not received.
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


PROMPT = "> "
MOST_TOKENS = 1024
# Seconds for a cancelled answer to say that it has ended.
FAREWELL_S = 3.0
# Seconds for a running stack to say what it serves.
INFO_S = 30.0
HELP = "/clear begins anew, /system TEXT too, with instructions; /exit or Ctrl-D leaves; Ctrl-C ends an answer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", default="", metavar="TEXT", help="instructions before the conversation")
    parser.add_argument(
        "--chat-template", metavar="FILE", help="Jinja template (default: the model's; without one, names and colons)"
    )
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="S", help="of an answer (default: %(default)s s)"
    )
    parser.add_argument(
        "--provisional", action="store_true", help="on a terminal, show drafts underlined until they are decided"
    )
    add_sampling_arguments(parser, several=False, max_tokens=MOST_TOKENS)
    add_address_arguments(parser, references=False)


def run(args: argparse.Namespace) -> int:
    try:
        options, where, template = sampling_options(args), stack_address_of(args), chat_template_of(args)
        check_timeout(args.timeout)
    except InvalidParameter as error:
        say(f"specwire chat: error: {error}")
        return 2
    options["drafting"], options["ngram"] = not args.no_draft, not args.no_ngram
    options["provisional"] = args.provisional and is_terminal()
    options["model"] = args.model
    signal.signal(signal.SIGTERM, _leave)
    say_what_starts("chat", where)
    try:
        with (
            nullcontext(where.address) if where.address else own_stack(words_of(STACK, vars(args)), say) as address,
            asyncio.Runner() as runner,
            _client(runner, address, where) as client,
        ):
            style = runner.run(_greeted(client, address, where, template, args.model))
            try:
                ChatLoop(runner, client, Conversation(style, args.system), options, args.timeout).run(args.system)
            finally:
                runner.run(style.close())
    except (StackError, SpecwireError) as error:
        say(f"specwire chat: error: {error.message if isinstance(error, SpecwireError) else error}")
        return 1
    return 0


def _leave(number: int, _: FrameType | None) -> None:
    """Exit on a signal by an exception, so that what is open is closed."""
    raise SystemExit(128 + number)


@contextmanager
def _client(runner: asyncio.Runner, address: str, where: StackAddress) -> Iterator[AsyncClient]:
    async def opened() -> AsyncClient:
        return AsyncClient(address, tls=where.tls, token=where.token)

    client = runner.run(opened())
    try:
        yield client
    finally:
        runner.run(client.close())


async def _greeted(client: AsyncClient, address: str, where: StackAddress, template: str, model: str) -> Style:
    """How the model at `address` wants to see a conversation. Raises StackError."""
    try:
        return await _style(client, template, model)
    except SpecwireError as error:
        raise StackError(await explained(error, address, where.tls)) from None


async def _style(client: AsyncClient, template: str, model: str) -> Style:
    """The style that `template` gives, else the model's own template, else plain."""
    info = await client.server_info(timeout=INFO_S)
    target = next((each for each in info.targets if each.model == model), info.target)
    source = template or target.chat_template
    if not source:
        say(f"specwire chat: {target.model} has no chat template: 'User:' and 'Assistant:' stand before what is said")
        return Plain()
    if importlib.util.find_spec("jinja2") is None:
        raise StackError("the model's chat template needs the extra: pip install 'specwire[http]'")

    style = Templated(source, target.special_tokens, target.eos_ids)
    try:
        await style.check()
    except BaseException:
        await style.close()
        raise
    return style


class ChatLoop:
    """One conversation at a time. The event loop runs while an answer comes, and rests at the prompt."""

    def __init__(
        self,
        runner: asyncio.Runner,
        client: AsyncClient,
        conversation: Conversation,
        options: RequestOptions,
        timeout: float,
    ) -> None:
        self._runner = runner
        self._client = client
        self._conversation = conversation
        self._options = options.copy()
        self._options["stop"] = [*options.get("stop", ()), *conversation.style.stops]
        self._timeout = timeout

    def run(self, system: str) -> None:
        """Talk until the user leaves. system: what /clear keeps."""
        terminal = sys.stdin.isatty()
        if terminal:
            with suppress(ImportError):
                importlib.import_module("readline")  # lets input() edit lines, and recall them
            say(f"specwire chat: {HELP}")
        while (line := _read(terminal)) is not None:
            word, _, rest = line.strip().partition(" ")
            match word:
                case "":
                    continue
                case "/exit" | "/quit":
                    return
                case "/clear" | "/system":
                    system = rest if word == "/system" else system
                    self._conversation.clear(system)
                case _ if word.startswith("/"):
                    say(f"specwire chat: {HELP}")
                case _:
                    self._say(line.strip())

    def _say(self, text: str) -> None:
        """One turn; an error is shown, and the conversation goes on without the turn."""
        try:
            self._runner.run(self._turn(text))
        except InvalidParameter as error:
            say(f"specwire chat: error: {error}")
        except SpecwireError as error:
            say(f"specwire chat: error: {error.message}")

    async def _turn(self, text: str) -> None:
        turn = await self._conversation.turn(text)
        answer = Reply(self._client, turn, self._options, self._timeout)
        try:
            completion = await answer.run()
        except SpecwireError as error:
            if not turn.parent or error.code is not grpc.StatusCode.NOT_FOUND:
                raise
            self._conversation.forget_session()
            turn = await self._conversation.turn(text)
            answer = Reply(self._client, turn, self._options, self._timeout)
            completion = await answer.run()
        self._conversation.answered(turn, text, answer.text, completion, answer.decoded)
        if completion is not None and completion.finish_reason is FinishReason.ERROR:
            say(f"specwire chat: error: {completion.message}")
        elif completion is not None:
            LAST_LINE.say(dim(visible(summary(completion)), wants_colour() and sys.stderr.isatty()))


class Reply:
    """One answer, shown as it comes. The first SIGINT has the service end it, the second stops listening.

    decoded: code points of all tokens so far, those that are not shown included.
    """

    def __init__(self, client: AsyncClient, turn: Turn, options: RequestOptions, timeout: float) -> None:
        self._client = client
        self._turn = turn
        self._options = options
        self._timeout = timeout
        self._partial = PartialCompletion()
        self._consuming: asyncio.Task[None] | None = None
        self._cancelling: asyncio.Task[None] | None = None
        self.decoded = 0

    @property
    def text(self) -> str:
        return "".join(self._partial.texts)

    async def run(self) -> Completion | None:
        """Show an answer; None where its end was not waited for. Raises SpecwireError."""
        loop = asyncio.get_running_loop()
        self._consuming = asyncio.ensure_future(self._consume())
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        try:
            await self._consuming
        except asyncio.CancelledError:
            return None
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            self._consuming.cancel()
            if self._cancelling is not None:
                self._cancelling.cancel()
        return self._partial.completion()

    def _interrupt(self) -> None:
        if self._consuming is None:
            return
        if self._partial.started is None or self._cancelling is not None:
            self._consuming.cancel()
        else:
            ending = self._end(self._partial.started.session_id, self._consuming)
            self._cancelling = asyncio.ensure_future(ending)

    async def _end(self, session_id: str, consuming: asyncio.Task[None]) -> None:
        with suppress(SpecwireError):
            await self._client.cancel(session_id, timeout=FAREWELL_S)
        await asyncio.wait({consuming}, timeout=FAREWELL_S)
        consuming.cancel()

    async def _consume(self) -> None:
        paint, tail = painter(), ProvisionalTail()
        options: RequestOptions = {**self._options, "parent": self._turn.parent}
        over = False
        try:
            events = self._client.generate(self._turn.prompt, timeout=self._timeout, **options)
            async with aclosing(events):
                async for event in events:
                    self._partial.add(event)
                    over = isinstance(event, Finished)
                    if isinstance(event, Chunk) and event.text_ends:
                        self.decoded = event.text_ends[-1]
                    print(shown(event, paint, tail), end="", flush=True)
        finally:
            if not over:
                print(tail.show(""), flush=True)


def _read(terminal: bool) -> str | None:
    """The next line; None at the end. Ctrl-C drops what was typed."""
    while True:
        try:
            return input(PROMPT if terminal else "")
        except EOFError:
            if terminal:
                print()
            return None
        except KeyboardInterrupt:
            print()


# ----------------------------------------------------------------------------------------------------------------------
# A stack in a process of its own: this one waits for its user and not for events.

STOP_GRACE_S = 10.0


@contextmanager
def own_stack(words: Sequence[str], report: Callable[[str], None]) -> Iterator[str]:
    """Its address. It runs while the context lasts, whatever signals the terminal sends to this process.

    `report` gets the lines that it says while it starts. Raises StackError.
    """
    ours = ["--json", "--listen", ANY_PORT, "--http", "none", "--unlisted"]
    command = [sys.executable, "-m", "deploy", "up", *words, *ours]
    kept = {name: value for name, value in environment().items() if not name.startswith(PREFIX)}
    child = BlockingChild(command, signal.SIGTERM, kept, report)
    try:
        line = child.line()
        if not line:
            child.process.wait(STOP_GRACE_S)
            raise StackError(child.last_words().rpartition("error: ")[2] or "the stack ended without a word")
        child.report = lambda _: None
        yield str(json.loads(line)["address"])
    finally:
        child.stop(STOP_GRACE_S)
