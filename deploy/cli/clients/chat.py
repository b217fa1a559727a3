"""`specwire chat`: a conversation on a terminal, or with lines from a pipe.

Ctrl-C while an answer comes ends the answer; at the prompt it drops the line. Ctrl-D or /exit leaves. Each turn sends
all messages, which the orchestrator renders by the model's chat template; the verifier's cache has those before.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, nullcontext, suppress
from types import FrameType

from deploy.cli.clients.generate import add_sampling_arguments, check_timeout, sampling_options, shown, summary
from deploy.cli.stack_address import StackAddress, add_address_arguments, explained, say_what_starts, stack_address_of
from deploy.cli.terminal import dim, painter, wants_colour
from deploy.settings import PREFIX
from deploy.stack.options import StackError
from deploy.stack.processes import BlockingChild, environment
from specwire.client import AsyncClient, Chat, Completion, Finished, SpecwireError
from specwire.client.events import PartialCompletion
from specwire.client.requests import RequestOptions
from specwire.core.invalid import InvalidParameter
from specwire.core.messages import FinishReason
from specwire.named_models import REAL, how_to_get
from specwire.options import STACK, words_of
from specwire.progress import LAST_LINE
from specwire.rpc.process import say, visible
from specwire.rpc.server_options import ANY_PORT

PROMPT = "> "
MOST_TOKENS = 1024
# Seconds for a cancelled answer to say that it has ended.
FAREWELL_S = 3.0
# Seconds for a running stack to say what it serves.
INFO_S = 30.0
# What else there is to do about a model without a chat template, of a running stack, and of one that is started.
HOW_ELSE = "or start the stack with --chat-template FILE"
OWN_ELSE = f"give --chat-template FILE, or take a real model: {how_to_get(REAL)}"
HELP = "/clear begins anew, /system TEXT too, with instructions; /exit or Ctrl-D leaves; Ctrl-C ends an answer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", default="", metavar="TEXT", help="instructions before the conversation")
    parser.add_argument(
        "--chat-template", metavar="FILE", help="Jinja template of a stack that is started (default: the model's)"
    )
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="S", help="of an answer (default: %(default)s s)"
    )
    add_sampling_arguments(parser, several=False, max_tokens=MOST_TOKENS)
    add_address_arguments(parser, references=False)


def run(args: argparse.Namespace) -> int:
    try:
        options, where = sampling_options(args), stack_address_of(args)
        if args.chat_template and where.address:
            raise InvalidParameter("--chat-template", f"is of a stack that is started, not of {where.address}")
        check_timeout(args.timeout)
    except InvalidParameter as error:
        say(f"specwire chat: error: {error}")
        return 2
    options["drafting"], options["ngram"] = not args.no_draft, not args.no_ngram
    options["model"] = args.model
    signal.signal(signal.SIGTERM, _leave)
    words = words_of(STACK, vars(args)) + ([f"--chat-template={args.chat_template}"] if args.chat_template else [])
    say_what_starts("chat", where)
    try:
        with (
            nullcontext(where.address) if where.address else own_stack(words, say) as address,
            asyncio.Runner() as runner,
            _client(runner, address, where) as client,
        ):
            runner.run(_greet(client, address, where, args.model))
            ChatLoop(runner, client, options, args.timeout).run(args.system)
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


async def _greet(client: AsyncClient, address: str, where: StackAddress, model: str) -> None:
    """Raises StackError where no stack of ours answers, or the model has no chat template."""
    try:
        served = (await client.server_info(timeout=INFO_S)).targets
    except SpecwireError as error:
        raise StackError(await explained(error, address, where.tls)) from None
    asked = [each for each in served if model in ("", each.model)][:1]
    if asked and not asked[0].chat_template:
        instead = f"complete a text instead (specwire generate), {HOW_ELSE if where.address else OWN_ELSE}"
        raise StackError(f"{asked[0].model} has no chat template, so it cannot chat; {instead}")


class ChatLoop:
    """One conversation at a time. The event loop runs while an answer comes, and rests at the prompt."""

    def __init__(self, runner: asyncio.Runner, client: AsyncClient, options: RequestOptions, timeout: float) -> None:
        self._runner = runner
        self._client = client
        self._options = options
        self._timeout = timeout
        self._messages: list[dict[str, str]] = []

    def run(self, system: str) -> None:
        """Talk until the user leaves. system: what /clear keeps."""
        self._begin(system)
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
                    self._begin(system)
                case _ if word.startswith("/"):
                    say(f"specwire chat: {HELP}")
                case _:
                    self._say(line.strip())

    def _begin(self, system: str) -> None:
        self._messages = [{"role": "system", "content": system}] if system else []

    def _say(self, text: str) -> None:
        """One turn; an error is shown, and the conversation goes on without the turn."""
        try:
            self._runner.run(self._turn(text))
        except SpecwireError as error:
            say(f"specwire chat: error: {error.message}")

    async def _turn(self, text: str) -> None:
        messages = [*self._messages, {"role": "user", "content": text}]
        reply = Reply(self._client, Chat(messages), self._options, self._timeout)
        completion = await reply.run()
        self._messages = [*messages, {"role": "assistant", "content": reply.content}]
        if completion is not None and completion.finish_reason is FinishReason.ERROR:
            say(f"specwire chat: error: {completion.message}")
        elif completion is not None:
            LAST_LINE.say(dim(visible(summary(completion)), wants_colour() and sys.stderr.isatty()))


class Reply:
    """One answer, shown as it comes. The first SIGINT has the service end it, the second stops listening."""

    def __init__(self, client: AsyncClient, chat: Chat, options: RequestOptions, timeout: float) -> None:
        self._client = client
        self._chat = chat
        self._options = options
        self._timeout = timeout
        self._partial = PartialCompletion()
        self._consuming: asyncio.Task[None] | None = None
        self._cancelling: asyncio.Task[None] | None = None

    @property
    def content(self) -> str:
        """Without the model's reasoning."""
        return "".join(self._partial.content)

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
        paint = painter()
        over = False
        try:
            events = self._client.generate(self._chat, timeout=self._timeout, **self._options)
            async with aclosing(events):
                async for event in events:
                    self._partial.add(event)
                    over = isinstance(event, Finished)
                    print(shown(event, paint), end="", flush=True)
        finally:
            if not over:
                print(flush=True)


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
