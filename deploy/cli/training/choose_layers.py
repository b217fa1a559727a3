"""`specwire choose-layers`: which layers a target leaves out while it drafts for itself, found on texts of your own."""

from __future__ import annotations

import argparse
from pathlib import Path

from specwire.core.model import ModelError
from specwire.corpus import SEARCHED, texts_of
from specwire.options import add_options
from specwire.rpc.process import say

EPILOG = f"""\
FILES are texts, or lines of JSON with a "text" (.jsonl); in folders these are read:
{SEARCHED},
but no lock files, packages (node_modules) or hidden files. The target reads windows of them. Layers are left out one
after the other, as long as what it then drafts is right often enough for the time that is saved. What is written is for
--heads self:FILE of `specwire up` and `specwire verify`, with the same target and dtype. For L layers up
to L (L + 1) / 2 sets are tried, over all windows."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--target", required=True, metavar="MODEL", help="path or hub id of the target")
    add("--data", required=True, nargs="+", type=Path, metavar="FILE", help="texts to choose by")
    add("--out", required=True, type=Path, metavar="FILE", help="where the choice goes")
    add("--windows", type=int, default=20, metavar="N", help="pieces of text, one in 5 held out (default: %(default)s)")
    add(
        "--window",
        type=int,
        default=128,
        metavar="N",
        help="tokens of each, at most half its context (default: %(default)s)",
    )
    add_options(parser, "choose-layers", weights="of weights and arithmetic, as the verifier's")
    add("--device", default="cpu", help="such as cpu or cuda:0 (default: %(default)s)")
    add("--threads", type=int, metavar="N", help="CPU threads (default: as many as there are cores)")


def run(args: argparse.Namespace) -> int:
    """Choose, and write the choice; returns the exit code."""
    # These import torch, which a process that only parses arguments does not need.
    from specwire.lm.load import load_model
    from specwire.lm.training.layer_search import choose_layers, listed, windows_of

    def tell(line: str) -> None:
        say(f"specwire choose-layers: {line}")

    wrong = _refused(args)
    if wrong:
        tell(f"error: {wrong}")
        return 2
    try:
        lm = load_model(
            args.target,
            slots=args.windows,
            context=2 * args.window,
            dtype=args.dtype,
            device=args.device,
            threads=args.threads,
        )
        windows = windows_of(texts_of(args.data), lm.info, args.window, args.windows)
        choice = choose_layers(lm, windows, tell)
        choice.write(args.out)
    except (ModelError, OSError) as error:
        tell(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        tell("ended; nothing was written")
        return 130
    expected = f"acceptance {choice.acceptance:.3f} and {choice.gain:.3f} of plain decoding on what was held out"
    tell(f"{args.out}: skips {listed(choice.skip)}; expected are {expected}, {choice.depth} tokens deep")
    if choice.gain <= 1.0:
        tell("it is not expected to gain; a verifier drafts so now and then, to see whether it does")
    return 0


def _refused(args: argparse.Namespace) -> str:
    """What is wrong with the options; "" if nothing is."""
    for name in ("windows", "window"):
        if getattr(args, name) < 2:
            return f"{name}: must be at least 2, not {getattr(args, name)}"
    if args.threads is not None and args.threads < 1:
        return f"threads: must be at least 1, not {args.threads}"
    if not args.out.parent.is_dir():
        return f"out: there is no folder {args.out.parent}"
    missing = next((path for path in args.data if not path.exists()), None)
    return f"data: there is no {missing}" if missing is not None else ""
