"""`specwire train-drafter`: make a small drafter of a few of the target's layers, and teach it the target's answers."""

from __future__ import annotations

import argparse

from deploy.cli.training.train_heads import OWN_ANSWERS, Reached, add_training_arguments, carried_out, refused
from specwire.rpc.process import say

EPILOG = f"""\
The drafter is a model of the target's width, made of layers of it (--layers), with an embedding of the ids that the
answers say most often (--draft-vocabulary) and one row for all others. It learns the target's own answers.
{OWN_ANSWERS}
What is written is for --draft of `specwire up` and for `specwire draft`: safetensors in bfloat16, with the
target's tokenizer. It drafts in the target's ids, and draft_vocabulary.json tells which of them it says. training.json
tells by what it was trained, and how right it is: greedily, and expected at temperature 1."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
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
    add_training_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Train, or go on with a training that was ended; returns the exit code."""
    # Imports torch, which a process that only parses arguments does not need.
    from specwire.lm.training.drafter import DrafterCourse, teach_drafter

    if wrong := refused(args):
        say(f"specwire train-drafter: error: {wrong}")
        return 2
    course = DrafterCourse(
        target=args.target,
        out=args.out,
        answers=args.answers,
        tokens=args.tokens,
        apart=tuple(args.apart),
        prompts=tuple(args.prompts),
        layers=tuple(args.layers),
        draft_vocabulary=args.draft_vocabulary,
        steps=args.steps,
        rows=args.rows,
        window=args.window,
        rate=args.rate,
        threads=args.threads,
    )

    def reached(found: tuple[list[float], list[float]]) -> Reached:
        greedy, drawn = found
        what = "held-out acceptance by position"
        return [(f"{what}, greedily", greedy), (f"{what}, expected at temperature 1", drawn)]

    return carried_out("train-drafter", args, lambda tell: reached(teach_drafter(course, tell)))
