"""`specwire demo`: real completions through the whole stack, with drafting and without, and what drafting gained."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

import demo_pair
from deploy.cli import comparison as near_tie
from deploy.cli.comparison import NAME_WIDTH, Pair, as_object, counts, report
from deploy.cli.main import run_owned
from deploy.cli.terminal import dim, legend, painter, shortened, wants_colour
from deploy.stack.options import StackError, StackOptions, add_stack_arguments, stack_options
from deploy.stack.starting import start_shown
from specwire.client import AsyncClient, Chunk, Completion, Finished, SpecwireError
from specwire.client.events import Gathering
from specwire.core.invalid import InvalidParameter
from specwire.core.messages import FinishReason
from specwire.progress import LAST_LINE
from specwire.rpc.process import say

TIMEOUT = 60.0
SHOWN_LINES = 4
WARM_UP_TOKENS = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", type=int, default=5, metavar="N", help="how many prompts (default: %(default)s)")
    parser.add_argument(
        "--max-tokens", type=int, default=120, metavar="N", help="of a completion (default: %(default)s)"
    )
    parser.add_argument(
        "--prompts", metavar="F", help="JSON list of texts, or of {name, text} (default: held out from training)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of texts and table")
    add_stack_arguments(parser)


def run(args: argparse.Namespace) -> int:
    try:
        options = stack_options(args)
        prompts = prompts_of(args)
        if args.max_tokens < 1:
            raise InvalidParameter("max_tokens", f"must be at least 1, not {args.max_tokens}")
        if options.draft is None:
            raise InvalidParameter("draft", "there is nothing to compare without a drafter")
    except InvalidParameter as error:
        say(f"specwire demo: error: {error}")
        return 2
    return run_owned("demo", lambda folder: _demo(options, prompts, args.max_tokens, args.json, folder))


def prompts_of(args: argparse.Namespace) -> list[demo_pair.Prompt]:
    """Return the prompts that the command line asks for; InvalidParameter names what is wrong."""
    if args.count < 1:
        raise InvalidParameter("count", f"must be at least 1, not {args.count}")
    if args.prompts is None:
        return demo_pair.held_out_prompts()[: args.count]
    try:
        rows = json.loads(Path(args.prompts).read_text(encoding="utf-8"))
        prompts = [_prompt_of(row) for row in rows]
    except (OSError, ValueError, TypeError) as error:
        raise InvalidParameter("prompts", f"{args.prompts} cannot be used: {error}") from None
    if not prompts:
        raise InvalidParameter("prompts", f"{args.prompts} holds none")
    return prompts[: args.count]


def _prompt_of(row: object) -> demo_pair.Prompt:
    """TypeError says what it is not."""
    if isinstance(row, str):
        row = {"name": shortened(row, NAME_WIDTH), "text": row}
    if not isinstance(row, dict) or row.keys() != {"name", "text"} or not all(isinstance(v, str) for v in row.values()):
        raise TypeError(f"{shortened(json.dumps(row), NAME_WIDTH)} is neither a text nor an object of name and text")
    return demo_pair.Prompt(**row)


async def _demo(
    options: StackOptions, prompts: Sequence[demo_pair.Prompt], max_tokens: int, as_json: bool, folder: Path
) -> int:
    LAST_LINE.quiet = as_json
    running = await start_shown(options, folder)
    try:
        async with AsyncClient(running.address) as client:
            return await Demo(client, options, max_tokens, as_json).run(prompts)
    except SpecwireError as error:
        raise StackError(error.message) from None
    finally:
        await running.stop()


class Demo:
    """Completes prompts with drafting on (shown) and off, and compares. as_json: tells nothing until the end."""

    def __init__(self, client: AsyncClient, options: StackOptions, max_tokens: int, as_json: bool) -> None:
        self._client = client
        self._options = options
        self._max_tokens = max_tokens
        self._as_json = as_json
        self._colour = wants_colour()

    async def run(self, prompts: Sequence[demo_pair.Prompt]) -> int:
        """Print completions and the comparison; 1 if a difference is no near-tie."""
        models = {"target": self._options.target, "draft": self._options.draft}
        self._tell("\n" + "".join(f"{name:6} {model}\n" for name, model in models.items()))
        self._tell((legend() if self._colour else "not a terminal: outcomes are counted below each completion") + "\n")
        await self._warm_up(prompts[0])
        pairs = [await self._pair(index, prompt) for index, prompt in enumerate(prompts)]
        found = [await self._parting(pair) for pair in pairs]
        partings = [parting for parting in found if parting is not None]
        print(json.dumps({**models, **as_object(pairs, found)}) if self._as_json else "\n" + report(pairs, partings))
        return 0 if all(parting.near_tie for parting in partings) else 1

    def _tell(self, text: str) -> None:
        if not self._as_json:
            print(text, end="", flush=True)

    async def _warm_up(self, prompt: demo_pair.Prompt) -> None:
        for drafting in (True, False):
            await self._client.complete(prompt.text, max_tokens=WARM_UP_TOKENS, drafting=drafting, timeout=TIMEOUT)

    async def _pair(self, index: int, prompt: demo_pair.Prompt) -> Pair:
        """Complete with and without drafting; which comes first alternates, so that neither gains by its place.

        Both begin from the prompt's keys and values, which a token asked for before leaves at the verifier.
        """
        await self._client.complete(prompt.text, max_tokens=1, drafting=False, timeout=TIMEOUT)
        if index % 2:
            off = await self._complete(prompt, drafting=False)
            return Pair(prompt.name, off, await self._show(prompt))
        on = await self._show(prompt)
        return Pair(prompt.name, await self._complete(prompt, drafting=False), on)

    async def _complete(self, prompt: demo_pair.Prompt, drafting: bool) -> Completion:
        completion = await self._client.complete(
            prompt.text, max_tokens=self._max_tokens, drafting=drafting, timeout=TIMEOUT
        )
        return _checked(completion)

    async def _show(self, prompt: demo_pair.Prompt) -> Completion:
        """Complete with drafting, painting the text as it comes."""
        lines = prompt.text.splitlines(keepends=True)[-SHOWN_LINES:]
        paint, gathering = painter(), Gathering()
        self._tell(paint.plain(f"\n--- {prompt.name}\n") + dim(paint.plain("".join(lines)), self._colour))
        async with aclosing(self._client.generate(prompt.text, max_tokens=self._max_tokens, timeout=TIMEOUT)) as events:
            async for event in events:
                gathering.add(event)
                if isinstance(event, Chunk):
                    self._tell(paint.chunk(event))
                elif isinstance(event, Finished):
                    self._tell(paint.text(event.text) + "\n")
        completion = _checked(gathering.completion())
        self._tell(f"[{counts(completion)}]\n")
        return completion

    async def _parting(self, pair: Pair) -> near_tie.Parting | None:
        """Examine where the two texts part, if they do."""
        at = near_tie.first_difference(pair.off.tokens, pair.on.tokens)
        if at is None:
            return None
        if at >= min(len(pair.off.tokens), len(pair.on.tokens)):
            raise StackError(f"{pair.name}: one text is a beginning of the other, which no tie of scores explains")
        state = await self._client.get_session(pair.off.session_id)
        text = state.tokens[: state.prompt_tokens + at]
        options = self._options
        tokens = (pair.off.tokens[at], pair.on.tokens[at])
        return await asyncio.to_thread(near_tie.examine, options.target, options.dtype, text, tokens)


def _checked(completion: Completion) -> Completion:
    if completion.finish_reason is FinishReason.ERROR:
        raise StackError(completion.message)
    return completion
