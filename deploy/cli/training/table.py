"""`specwire table build`: count the n-grams of a corpus into a file that a verifier proposes from."""

from __future__ import annotations

import argparse
from itertools import chain
from pathlib import Path

from specwire.core.invalid import InvalidParameter
from specwire.core.model import ModelError
from specwire.core.verify.table import LEAST_ORDER, MOST_ORDER, NgramTable
from specwire.corpus import SEARCHED, texts_of
from specwire.rpc.process import say
from specwire.text.table_file import save_table

EPILOG = f"""\
CORPUS are texts, or lines of JSON with a "text" (.jsonl); in folders these are read:
{SEARCHED},
but no lock files, packages (node_modules) or hidden files. A folder of answers that `specwire train-heads` or
`train-drafter` has kept counts as what its target answered there, but for what is held out. What is written is for
--table of `specwire up` and `specwire verify` with a target of the same tokenizer. It holds the most frequent token
behind each context of up to N - 1 tokens, and its share: no text, but whoever has it can read off what often follows
what."""
BUILD = "build"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    parser.add_argument("action", choices=[BUILD], metavar=BUILD, help="count a corpus")
    parser.add_argument("corpus", nargs="+", type=Path, metavar="CORPUS", help="texts to count")
    parser.add_argument("--tokenizer", required=True, metavar="MODEL", help="path, hub id or named model of the target")
    parser.add_argument(
        "--order",
        type=int,
        default=4,
        metavar="N",
        help=f"tokens of an n-gram, from {LEAST_ORDER} to {MOST_ORDER} (default: %(default)s)",
    )
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="where the table goes")


def run(args: argparse.Namespace) -> int:
    """Build and write the table; returns the exit code."""
    # These import torch, which a process that only parses arguments does not need.
    import hashlib

    from tokenizers import Tokenizer

    from specwire.lm.training.kept_texts import answers_in, holds_texts
    from specwire.lm.training.own_answers import digest_of, text_of_target
    from specwire.named_models import located

    wrong = _refused(args)
    if wrong:
        say(f"specwire table: error: {wrong}")
        return 2
    try:
        spec = located(args.tokenizer)
        serialised = text_of_target(spec).tokenizer_json
        if not serialised:
            raise ModelError(f"tokenizer: {args.tokenizer} has none")
        tokenizer = Tokenizer.from_str(serialised.decode())
        kept = [path for path in args.corpus if holds_texts(path)]
        others = [path for path in args.corpus if path not in kept]
        texts = (tokenizer.encode(text, add_special_tokens=False).ids for text in texts_of(others))
        answers = (text for folder in kept for text in answers_in(folder, digest_of(spec), args.order - 1))
        table = NgramTable.built(chain(answers, texts), args.order, hashlib.sha256(serialised).hexdigest())
        if not table.contexts:
            raise ModelError("corpus: it has no two tokens in a row")
        save_table(table, args.out)
    except (ModelError, InvalidParameter, OSError) as error:
        say(f"specwire table: error: {error}")
        return 1
    except KeyboardInterrupt:
        say("specwire table: ended; nothing was written")
        return 130
    size = args.out.stat().st_size / (1 << 20)
    say(f"specwire table: {args.out}: {table.contexts} contexts, order {table.order}, {size:.1f} MiB")
    return 0


def _refused(args: argparse.Namespace) -> str:
    """What is wrong with the options; "" if nothing is."""
    if not LEAST_ORDER <= args.order <= MOST_ORDER:
        return f"order: must be from {LEAST_ORDER} to {MOST_ORDER}, not {args.order}"
    if not args.out.parent.is_dir():
        return f"out: there is no folder {args.out.parent}"
    missing = next((path for path in args.corpus if not path.exists()), None)
    return f"corpus: there is no {missing}" if missing is not None else ""
