"""`specwire train-heads`: train a head that drafts beside a target, on its own answers."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from specwire.core.model import ModelError
from specwire.rpc.process import say

# Tokens of a run; `specwire.lm.training.prompts` has it too, whose imports take seconds.
APART = 13
OWN_ANSWERS = f"""\
Own answers are to --prompts (.jsonl: "turns", "prompt", "question" or "text"), such as your users' own; then to turns
that the target itself makes up behind its template's header of a user's turn, and to requests made of docstrings of
permissively licensed packages that are installed here. They are kept in --answers, with the features that heads read,
for `train-heads` and `train-drafter` alike: none is computed twice. --apart names files of the same kind that no text
may share a run of {APART} tokens with.
Every hundred steps are kept in --out, and a training that was ended goes on there, as do the answers."""
EPILOG = f"""\
An EAGLE-3 head learns the target's own answers.
{OWN_ANSWERS}
What is written is for --heads of `specwire up` and `specwire verify`, in safetensors, in speculators' format.
training.json beside it tells by what it was trained, and how right it is."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--target", required=True, metavar="MODEL", help="path or hub id of the target")
    add_training_arguments(parser)
    add("--depth", type=int, default=4, metavar="N", help="guesses in a row that it learns (default: %(default)s)")
    add("--draft-vocabulary", type=int, default=32_000, metavar="N", help="ids that it says (default: %(default)s)")
    add("--inner", type=int, default=0, metavar="N", help="width of the gated layer (default: twice the target's)")
    add("--taps", type=int, nargs=3, metavar="LAYER", help="layers whose input it reads (default: spread)")


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    """What a training of heads and one of a drafter are told alike; see `refused`."""
    add = parser.add_argument
    add("--answers", type=Path, metavar="DIR", help="where own answers are kept (default: in --out)")
    add("--tokens", type=int, default=300_000, metavar="N", help="of own answers (default: %(default)s)")
    add("--prompts", nargs="+", type=Path, default=[], metavar="FILE", help="what is asked first (default: none)")
    add("--apart", nargs="+", type=Path, default=[], metavar="FILE", help="what own answers may not overlap with")
    add("--out", required=True, type=Path, metavar="DIR", help="where it goes, and what is kept meanwhile")
    add("--steps", type=int, default=2000, metavar="N", help="of the training (default: %(default)s)")
    add("--rows", type=int, default=8, metavar="N", help="windows a step (default: %(default)s)")
    add("--window", type=int, default=512, metavar="N", help="tokens of a window (default: %(default)s)")
    add("--rate", type=float, default=3e-3, metavar="X", help="highest learning rate (default: %(default)s)")
    add("--threads", type=int, metavar="N", help="CPU threads (default: as many as there are cores)")


def run(args: argparse.Namespace) -> int:
    """Train, or go on with a training that was ended; returns the exit code."""
    # Imports torch, which a process that only parses arguments does not need.
    from specwire.lm.training.head import HeadCourse, teach

    wrong = _refused(args)
    if wrong:
        say(f"specwire train-heads: error: {wrong}")
        return 2
    course = HeadCourse(
        target=args.target,
        out=args.out,
        answers=args.answers,
        tokens=args.tokens,
        apart=tuple(args.apart),
        prompts=tuple(args.prompts),
        steps=args.steps,
        rows=args.rows,
        window=args.window,
        depth=args.depth,
        rate=args.rate,
        draft_vocabulary=args.draft_vocabulary,
        inner=args.inner,
        taps=tuple(args.taps or ()),
        threads=args.threads,
    )
    return carried_out("train-heads", args, lambda tell: [("held-out acceptance by position", teach(course, tell))])


Reached = list[tuple[str, list[float]]]


def carried_out(command: str, args: argparse.Namespace, teach: Callable[[Callable[[str], None]], Reached]) -> int:
    """Train, and say what was reached, by what is measured; the exit code."""
    try:
        reached = teach(lambda line: say(f"specwire {command}: {line}"))
    except ModelError as error:
        say(f"specwire {command}: error: {error}")
        return 1
    except KeyboardInterrupt:
        say(f"specwire {command}: ended; the same command goes on from what {args.out} holds")
        return 130
    for what, shares in reached:
        say(f"specwire {command}: {args.out}: {what} {' '.join(f'{share:.3f}' for share in shares)}")
    return 0


def _refused(args: argparse.Namespace) -> str:
    """What is wrong with the options; "" if nothing is."""
    if args.inner < 0:
        return f"inner: must not be negative, not {args.inner}"
    return refused(args, ("depth",))


def refused(args: argparse.Namespace, further: Sequence[str] = ()) -> str:
    """What is wrong with the options that a training of heads and one of a drafter share; "" if nothing is.

    further: names of others that must be at least 1.
    """
    for name in ("steps", "rows", "window", "tokens", "draft_vocabulary", *further):
        if getattr(args, name) < 1:
            return f"{name.replace('_', '-')}: must be at least 1, not {getattr(args, name)}"
    if args.threads is not None and args.threads < 1:
        return f"threads: must be at least 1, not {args.threads}"
    if not 0 < args.rate < 1:
        return f"rate: must be above 0 and below 1, not {args.rate:g}"
    named = [("apart", path) for path in args.apart] + [("prompts", path) for path in args.prompts]
    return next((f"{option}: there is no {path}" for option, path in named if not path.exists()), "")
