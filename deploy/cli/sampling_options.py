"""How tokens are drawn, and when a text ends: options of `specwire generate`, checked before anything starts."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from specwire.client.requests import MOST_COMPLETIONS, RequestOptions
from specwire.core.invalid import InvalidParameter
from specwire.core.law.constraint import Constraint, ConstraintKind
from specwire.core.law.sampling import (
    KNOWN,
    MOST_LOGPROBS,
    LogprobsOf,
    Sampling,
    resolve_rule,
    seed_of,
)
from specwire.core.limits import Stopping, check_constraint
from specwire.core.placement import check_priority

DEFAULT_TOKENS = 128


def add_sampling_arguments(
    parser: argparse.ArgumentParser, several: bool = True, max_tokens: int = DEFAULT_TOKENS
) -> None:
    """What `sampling_options` reads, --json and --provisional apart.

    several: also what concerns the whole output. max_tokens: by default, as far as the context has room.
    """
    add = parser.add_argument_group("sampling").add_argument
    parser.set_defaults(default_max_tokens=max_tokens)
    add("--max-tokens", type=int, metavar="N", help=f"default: {max_tokens}, or as many as the context has room for")
    add("--min-tokens", type=int, default=0, metavar="N", help="draw no id that ends the text before")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    add("--top-k", type=int, default=0, metavar="K", help="keep the K most probable tokens, 0 all")
    add("--top-p", type=float, default=1.0, metavar="P", help="keep the most probable mass P")
    add("--min-p", type=float, default=0.0, metavar="P", help="keep what is P times as probable as the best")
    add("--repetition-penalty", type=float, default=1.0, metavar="F", help="of prompt and output; 1 is none")
    add("--presence-penalty", type=float, default=0.0, metavar="F", help="of what the output holds; 0 is none")
    add("--frequency-penalty", type=float, default=0.0, metavar="F", help="for each time; 0 is none")
    add("--logit-bias", action="append", default=[], metavar="ID=B", help="add B to an id's logit; may be repeated")
    add("--stop", action="append", default=[], metavar="S", help="end before S; may be repeated")
    add("--stop-id", action="append", type=int, default=[], metavar="ID", help="end behind ID; may be repeated")
    add("--ignore-eos", action="store_true", help="go on after the end of the text")
    add("--seed", type=int, metavar="S", help="of the noise (default: drawn, and told)")
    add(
        "--priority",
        type=int,
        default=0,
        metavar="N",
        help="among what waits for a slot; the greatest first",
    )
    add(
        "--rule",
        default="",
        metavar="R",
        help=f"acceptance rule: {KNOWN}; the last two are lossy (default: by --temperature)",
    )
    _add_form_arguments(parser)
    if several:
        _add_output_arguments(parser)
    else:
        parser.set_defaults(n=1, logprobs=None, logprobs_of=None, echo=False, json=False)


def _add_form_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group(
        "form of the output, at most one (docs/CONSTRAINED.md)"
    ).add_mutually_exclusive_group()
    add.add_argument("--json-schema", metavar="FILE|JSON", help="JSON that fits this schema")
    add.add_argument("--regex", metavar="R", help="what this regular expression matches")
    add.add_argument("--choice", action="append", default=[], metavar="TEXT", help="one of several; repeat it")
    add.add_argument("--grammar", metavar="FILE", help="what this Lark grammar describes")


def _add_output_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("output").add_argument
    add("-n", "--n", type=int, default=1, metavar="N", help="completions of the prompt (default: %(default)s)")
    add(
        "--logprobs",
        type=int,
        metavar="N",
        help=f"with --json: of each token, and of the N best (0 to {MOST_LOGPROBS})",
    )
    add("--logprobs-of", choices=("model", "processed"), help="the model's own (default), or what is drawn from")
    add("--echo", action="store_true", help="show the prompt, too")


def sampling_options(args: argparse.Namespace) -> RequestOptions:
    """What the command line asks for; InvalidParameter names what is wrong."""
    _check(args)
    return RequestOptions(
        max_tokens=_max_tokens(args),
        fit_context=args.max_tokens is None,
        min_tokens=args.min_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        logit_bias=dict(map(_bias, args.logit_bias)),
        stop=args.stop,
        stop_ids=args.stop_id,
        ignore_eos=args.ignore_eos,
        seed=args.seed,
        priority=args.priority,
        rule=args.rule,
        logprobs=args.logprobs,
        logprobs_of=args.logprobs_of or "",
        echo=args.echo,
        **_form(args),
    )


def _max_tokens(args: argparse.Namespace) -> int:
    return int(args.default_max_tokens if args.max_tokens is None else args.max_tokens)


def _form(args: argparse.Namespace) -> RequestOptions:
    """What form the output must have; none where nothing is asked for."""
    if args.json_schema is not None:
        given = args.json_schema.strip()
        return RequestOptions(json_schema=given if given.startswith("{") else _read("json_schema", given))
    if args.grammar is not None:
        return RequestOptions(grammar=_read("grammar", args.grammar))
    return RequestOptions(regex=args.regex) if args.regex is not None else RequestOptions(choices=args.choice)


def _constraint(args: argparse.Namespace) -> Constraint | None:
    """The same, checked."""
    for kind, value in _form(args).items():
        texts = tuple(value) if isinstance(value, list) else (str(value),)
        return Constraint(ConstraintKind(kind), texts) if texts else None
    return None


def _read(field: str, name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidParameter(field, f"{name} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InvalidParameter(field, f"{name} is not UTF-8 at byte {error.start}") from None


def _check(args: argparse.Namespace) -> None:
    """What a service would refuse, too, and what makes no sense here."""
    resolve_rule(args.rule, _sampling(args))
    stopping = Stopping(_max_tokens(args), frozenset(args.stop_id), args.ignore_eos, args.min_tokens)
    check_constraint(_constraint(args), stopping)
    check_priority(args.priority)
    if not all(args.stop):
        raise InvalidParameter("stop", "must not be empty")
    if not 1 <= args.n <= MOST_COMPLETIONS:
        raise InvalidParameter("n", f"must be from 1 to {MOST_COMPLETIONS}, not {args.n}")
    if args.n > 1 and args.provisional:
        raise InvalidParameter("provisional", f"is shown of one completion, so n must be 1, not {args.n}")
    if args.logprobs is not None and not args.json:
        raise InvalidParameter("logprobs", "are told with --json only")


def _sampling(args: argparse.Namespace) -> Sampling:
    sampling = Sampling(
        args.temperature,
        args.top_k,
        args.top_p,
        seed_of(args.seed or 0),
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        logit_bias=tuple(sorted(map(_bias, args.logit_bias))),
        logprobs=args.logprobs,
    )
    return sampling if args.logprobs_of is None else replace(sampling, logprobs_of=LogprobsOf[args.logprobs_of.upper()])


def _bias(given: str) -> tuple[int, float]:
    token, _, bias = given.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise InvalidParameter("logit_bias", f"must be ID=B, not {given!r}") from None
