"""`specwire train-heads` and `train-drafter`: teach a head or a small drafter a target's own answers."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from specwire.core.model import ModelError
from specwire.rpc.process import say
from specwire.rpc.server_options import filled

# Tokens of a run; `specwire.lm.training.prompts` has it too, whose imports take seconds.
APART = 13
OWN_ANSWERS = f"""\
Own answers are to --prompts (.jsonl: "turns", "prompt", "question" or "text"), such as your users' own; then to turns
that the target itself makes up behind its template's header of a user's turn, and to requests made of docstrings of
permissively licensed packages that are installed here. They are kept in --answers, with the features that heads read,
for `train-heads` and `train-drafter` alike: none is computed twice. --apart names files of the same kind that no text
may share a run of {APART} tokens with.
Every hundred steps are kept in --out, and a training that was ended goes on there, as do the answers."""
HEADS = f"""\
An EAGLE-3 head learns the target's own answers.
{OWN_ANSWERS}
What is written is for --heads of `specwire up` and `specwire verify`, in safetensors, in speculators' format.
training.json beside it tells by what it was trained, and how right it is."""
DRAFTER = f"""\
The drafter is a model of the target's width, made of layers of it (--layers), with an embedding of the ids that the
answers say most often (--draft-vocabulary) and one row for all others. It learns the target's own answers.
{OWN_ANSWERS}
What is written is for --draft of `specwire up` and for `specwire draft`: safetensors in bfloat16, with the
target's tokenizer. It drafts in the target's ids, and draft_vocabulary.json tells which of them it says. training.json
tells by what it was trained, and how right it is: greedily, and expected at temperature 1."""

POSITIONS = "held-out acceptance by position"
Reached = list[tuple[str, list[float]]]
Taught = Callable[[argparse.Namespace, Callable[[str], None]], Reached]


class Heads:
    """`specwire train-heads`, as a `deploy.settings.Module`."""

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.epilog, parser.formatter_class = HEADS, argparse.RawDescriptionHelpFormatter
        add = parser.add_argument
        add("--target", required=True, metavar="MODEL", help="path or hub id of the target")
        _add_training_arguments(parser)
        add("--depth", type=int, default=4, metavar="N", help="guesses in a row that it learns (default: %(default)s)")
        add("--draft-vocabulary", type=int, default=32_000, metavar="N", help="ids that it says (default: %(default)s)")
        add("--inner", type=int, default=0, metavar="N", help="width of the gated layer (default: twice the target's)")
        add("--taps", type=int, nargs=3, metavar="LAYER", help="layers whose input it reads (default: spread)")

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        return _carried_out("train-heads", args, _taught_heads)


class Drafter:
    """`specwire train-drafter`, as a `deploy.settings.Module`."""

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.epilog, parser.formatter_class = DRAFTER, argparse.RawDescriptionHelpFormatter
        add = parser.add_argument
        add("--target", required=True, metavar="MODEL", help="path, hub id or named model, of the Llama family")
        add(
            "--layers",
            type=int,
            nargs="+",
            default=[0, 1, -1],
            metavar="LAYER",
            help="of the target, in this order; -1 is the last (default: 0 1 -1)",
        )
        add("--draft-vocabulary", type=int, default=8192, metavar="N", help="ids that it says (default: %(default)s)")
        _add_training_arguments(parser)

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        return _carried_out("train-drafter", args, _taught_drafter)


def _add_training_arguments(parser: argparse.ArgumentParser) -> None:
    """What both are told alike; see `_refused`."""
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


# These import torch, which a process that only parses arguments does not need.


def _taught_heads(args: argparse.Namespace, tell: Callable[[str], None]) -> Reached:
    from specwire.lm.training.head import HeadCourse, teach

    return [(POSITIONS, teach(filled(HeadCourse, args), tell))]


def _taught_drafter(args: argparse.Namespace, tell: Callable[[str], None]) -> Reached:
    from specwire.lm.training.drafter import DrafterCourse, teach_drafter

    greedy, drawn = teach_drafter(filled(DrafterCourse, args), tell)
    return [(f"{POSITIONS}, greedily", greedy), (f"{POSITIONS}, expected at temperature 1", drawn)]


def _carried_out(command: str, args: argparse.Namespace, taught: Taught) -> int:
    """Train, or go on with a training that was ended, and say what was reached, by what is measured; the exit code."""
    if wrong := _refused(args):
        say(f"specwire {command}: error: {wrong}")
        return 2
    try:
        reached = taught(args, lambda line: say(f"specwire {command}: {line}"))
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
    if getattr(args, "inner", 0) < 0:
        return f"inner: must not be negative, not {args.inner}"
    for name in ("steps", "rows", "window", "tokens", "draft_vocabulary", "depth"):
        if getattr(args, name, 1) < 1:
            return f"{name.replace('_', '-')}: must be at least 1, not {getattr(args, name)}"
    if args.threads is not None and args.threads < 1:
        return f"threads: must be at least 1, not {args.threads}"
    if not 0 < args.rate < 1:
        return f"rate: must be above 0 and below 1, not {args.rate:g}"
    named = [("apart", path) for path in args.apart] + [("prompts", path) for path in args.prompts]
    return next((f"{option}: there is no {path}" for option, path in named if not path.exists()), "")
