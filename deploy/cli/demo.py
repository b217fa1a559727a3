"""`specwire demo`: real completions through the whole stack, with drafting and without, and what drafting gained."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import demo_pair
from deploy.cli.generate import by_source, forwards
from deploy.cli.main import run_owned
from deploy.cli.terminal import dim, legend, number, painter, shortened, table, wants_colour
from deploy.stack.options import StackError, StackOptions, add_stack_arguments, stack_options
from deploy.stack.stack import start_shown
from specwire.client import AsyncClient, Chunk, Completion, Finished, SpecwireError
from specwire.client.events import PartialCompletion
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
        """Complete with and without drafting, in alternating order, so that neither gains by its place.

        Both start from the prompt's keys and values, which a request for one token left at the verifier before.
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
        paint, gathered = painter(), PartialCompletion()
        self._tell(paint.plain(f"\n--- {prompt.name}\n") + dim(paint.plain("".join(lines)), self._colour))
        async with aclosing(self._client.generate(prompt.text, max_tokens=self._max_tokens, timeout=TIMEOUT)) as events:
            async for event in events:
                gathered.add(event)
                if isinstance(event, Chunk):
                    self._tell(paint.chunk(event))
                elif isinstance(event, Finished):
                    self._tell(paint.text(event.text) + "\n")
        completion = _checked(gathered.completion())
        self._tell(f"[{counts(completion)}]\n")
        return completion

    async def _parting(self, pair: Pair) -> Divergence | None:
        """Examine where the two texts part, if they do."""
        at = first_difference(pair.off.tokens, pair.on.tokens)
        if at is None:
            return None
        if at >= min(len(pair.off.tokens), len(pair.on.tokens)):
            raise StackError(f"{pair.name}: one text is a beginning of the other, which no tie of scores explains")
        state = await self._client.get_session(pair.off.session_id)
        text = state.tokens[: state.prompt_tokens + at]
        options = self._options
        tokens = (pair.off.tokens[at], pair.on.tokens[at])
        return await asyncio.to_thread(examine, options.target, options.dtype, text, tokens)


def _checked(completion: Completion) -> Completion:
    if completion.finish_reason is FinishReason.ERROR:
        raise StackError(completion.message)
    return completion


# ----------------------------------------------------------------------------------------------------------------------
# Where two texts of the same target part: a near-tie of the target's scores, or a defect.
#
# The logits of a position depend a little on how many positions share a forward. Where the best scores are closer than
# that, either token is the target's own choice (docs/EXACTNESS.md).

FLOAT32_GAP = 1e-4
BFLOAT16_ULPS = 2
BFLOAT16_FRACTION_BITS = 7


@dataclass(frozen=True, slots=True)
class Divergence:
    """Two texts differ from `position` on: their tokens there, and how far each score is below the best one."""

    position: int
    tokens: tuple[int, int]
    gaps: tuple[float, float]
    tolerance: float

    @property
    def near_tie(self) -> bool:
        return max(self.gaps) <= self.tolerance

    def __str__(self) -> str:
        kind = "a near-tie" if self.near_tie else "NO near-tie"
        below = f"{self.gaps[0]:.2g} and {self.gaps[1]:.2g} below the best score, tolerance {self.tolerance:.2g}"
        return f"position {self.position}: tokens {self.tokens[0]} and {self.tokens[1]}, {below}: {kind}"


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first index at which the sequences differ; None if they are equal."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


def tolerance(dtype: str, top_score: float) -> float:
    """Return how close to the best score another may be to count as tied: ulps of that score in bfloat16."""
    if dtype == "float32":
        return FLOAT32_GAP
    exponent = math.floor(math.log2(abs(top_score))) if top_score else -126
    return float(BFLOAT16_ULPS * 2.0 ** (exponent - BFLOAT16_FRACTION_BITS))


def examine(model: str, dtype: str, text: Sequence[int], tokens: tuple[int, int]) -> Divergence:
    """Return how the target scores two tokens after `text`, by a forward of its own in this process."""
    # torch comes with it; needed only when texts differ
    from specwire.lm import Feed, load_model

    scores = load_model(model, slots=1, dtype=dtype).forward([Feed(0, 0, list(text), 1)])[0]
    top = float(scores.max())
    gaps = (top - float(scores[tokens[0]]), top - float(scores[tokens[1]]))
    return Divergence(len(text), tokens, gaps, tolerance(dtype, top))


HEAD = (
    "prompt",
    "tokens",
    "tokens/s off",
    "on",
    "ratio",
    "tokens/forward",
    "acceptance",
    "first token ms off",
    "on",
    "identical",
)
NAME_WIDTH = 36


@dataclass(frozen=True, slots=True)
class Pair:
    """One prompt's completions with drafting off and on."""

    name: str
    off: Completion
    on: Completion

    @property
    def identical(self) -> bool:
        return self.off.tokens == self.on.tokens


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of some pairs, with drafting off and on.

    acceptance: of the tokens that were tested; None if none was. first_token_ms: the median. identical: all texts are.
    """

    tokens: int
    tokens_per_second_off: float
    tokens_per_second_on: float
    ratio: float
    tokens_per_forward: float
    acceptance: float | None
    first_token_ms_off: float
    first_token_ms_on: float
    identical: bool


def report(pairs: Sequence[Pair], partings: Sequence[Divergence]) -> str:
    """Return the table, a row a prompt and one for all, and a sentence on the texts."""
    rows = [HEAD, *(_row(pair.name, [pair]) for pair in pairs), _row("all", pairs)]
    same = sum(pair.identical for pair in pairs)
    verdict = f"texts identical, token for token: {same} of {len(pairs)}"
    return "\n".join([table(rows), "", verdict, *(f"  different from {parting}" for parting in partings)])


def counts(completion: Completion) -> str:
    """Return how the tokens of a completion came to be decided."""
    stats = completion.stats
    return (
        f"{number(stats.output_tokens, 'token')}: {stats.accepted} accepted{by_source(stats)}, "
        f"{stats.recovered} recovered, {stats.bonus} bonus, {stats.direct} direct; {forwards(stats)}"
    )


def figures(pairs: Sequence[Pair]) -> Figures:
    """Return what a row of the table tells."""
    off, on = [pair.off for pair in pairs], [pair.on for pair in pairs]
    slow, fast = _speed(off), _speed(on)
    return Figures(
        tokens=_sum(on, "output_tokens"),
        tokens_per_second_off=slow,
        tokens_per_second_on=fast,
        ratio=_ratio(fast, slow),
        tokens_per_forward=_ratio(_sum(on, "output_tokens"), _sum(on, "target_forwards")),
        acceptance=_acceptance(on),
        first_token_ms_off=_first_token_ms(off),
        first_token_ms_on=_first_token_ms(on),
        identical=all(pair.identical for pair in pairs),
    )


def as_object(pairs: Sequence[Pair], partings: Sequence[Divergence | None]) -> dict[str, object]:
    """Return the comparison for scripts. partings: of each pair, None where its texts are one."""
    prompts = [
        {
            "name": pair.name,
            "text": pair.on.text,
            **asdict(figures([pair])),
            "parting": None if parting is None else {**asdict(parting), "near_tie": parting.near_tie},
        }
        for pair, parting in zip(pairs, partings, strict=True)
    ]
    return {"prompts": prompts, "all": asdict(figures(pairs))}


def _row(name: str, pairs: Sequence[Pair]) -> tuple[str, ...]:
    found = figures(pairs)
    return (
        name[:NAME_WIDTH],
        str(found.tokens),
        f"{found.tokens_per_second_off:.1f}",
        f"{found.tokens_per_second_on:.1f}",
        f"{found.ratio:.2f}",
        f"{found.tokens_per_forward:.2f}",
        "-" if found.acceptance is None else f"{found.acceptance:.2f}",
        f"{found.first_token_ms_off:.0f}",
        f"{found.first_token_ms_on:.0f}",
        "yes" if found.identical else "NO",
    )


def _speed(completions: Sequence[Completion]) -> float:
    """Output tokens per second, from each request's arrival to its end."""
    return _ratio(_sum(completions, "output_tokens"), _sum(completions, "duration_us") / 1e6)


def _acceptance(completions: Sequence[Completion]) -> float | None:
    """P(accept), given that the position was tested with everything before it accepted; None if none was."""
    tested = _sum(completions, "tested")
    return _sum(completions, "accepted") / tested if tested else None


def _first_token_ms(completions: Sequence[Completion]) -> float:
    return median(one.stats.time_to_first_token_us for one in completions) / 1e3


def _sum(completions: Sequence[Completion], figure: str) -> int:
    return sum(int(getattr(one.stats, figure)) for one in completions)


def _ratio(above: float, below: float) -> float:
    return above / below if below else 0.0
