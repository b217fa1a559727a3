"""Checks of what a session's client was told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from bench.soak.jobs import Job, Manner
from bench.soak.judge import WantedText, mismatches, wanted
from bench.soak.pairs import SoakPair
from bench.soak.reader import Told
from specwire.core.messages import FinishReason


class CheckKind(StrEnum):
    LOST = "lost"
    REPEATED = "repeated"
    MISMATCH = "mismatch"
    TEXT = "text is not that of the tokens"
    END = "did not end as asked"
    ERROR = "ended with an error"
    LOG = "the log says otherwise"
    READER = "another reader was told otherwise"
    NEAR_TIE = "near-tie"  # counted, and no fault


@dataclass(frozen=True, slots=True)
class SoakFinding:
    session: int
    kind: CheckKind
    detail: str


def check(pair: SoakPair, told: Told) -> list[SoakFinding]:
    return [SoakFinding(told.job.number, kind, detail) for kind, detail in _check(pair, told)]


def _check(pair: SoakPair, told: Told) -> Iterator[tuple[CheckKind, str]]:
    job, tokens = told.job, told.tokens
    if told.lost:
        yield CheckKind.LOST, f"{told.lost} tokens"
    if told.repeated:
        yield CheckKind.REPEATED, f"{told.repeated} tokens"
    if told.error:
        yield (CheckKind.LOST if told.error.startswith("DATA_LOSS") else CheckKind.ERROR), told.error
    for one in mismatches(pair, job, tokens):
        kind = CheckKind.NEAR_TIE if one.gap <= pair.tie else CheckKind.MISMATCH
        yield kind, f"token {one.at}: {one.got} instead of {one.expected}, {one.gap:.2e} behind it"
    yield from _end(job, told, wanted(pair, job, tokens))
    yield from _log(told)
    if told.second_error:
        yield CheckKind.ERROR, f"Watch: {told.second_error}"
    if told.second is not None and not told.error and told.second != tokens:
        yield CheckKind.READER, _difference(told.second, tokens)


def _end(job: Job, told: Told, due: WantedText) -> Iterator[tuple[CheckKind, str]]:
    """Of a session without an error: where its tokens end it, unless it was cancelled or left before."""
    if told.error:
        return
    if due.length < len(told.tokens):
        yield CheckKind.END, f"{len(told.tokens) - due.length} tokens behind the end ({due.reason!r})"
    elif told.end is None and job.manner is not Manner.LEAVE:
        yield CheckKind.END, f"the stream ended without Finished after {len(told.tokens)} tokens"
    elif told.end not in (None, due.reason) and not _may_end_early(told, told.end):
        yield CheckKind.END, f"{told.end!r} after {len(told.tokens)} tokens, not {due.reason!r}"
    complete = told.text == due.text
    if not (complete or (told.end is None and due.text.startswith(told.text))):
        yield CheckKind.TEXT, f"{told.text[-80:]!r} instead of {due.text[-80:]!r}"


def _may_end_early(told: Told, end: FinishReason | None) -> bool:
    """Nobody drives an orphan until it is asked for, which may be past its deadline."""
    if end is FinishReason.DEADLINE:
        return told.orphan
    return told.job.manner is not Manner.READ and end is FinishReason.CANCELLED


def _log(told: Told) -> Iterator[tuple[CheckKind, str]]:
    if told.log_error:
        yield CheckKind.ERROR, f"GetSession: {told.log_error}"
    if told.log is None:
        return
    logged = told.log.tokens[told.log.prompt_tokens :]
    shown = tuple(told.tokens)
    if told.end is None:
        logged = logged[: len(shown)]
    if logged != shown:
        yield CheckKind.LOG, _difference(logged, shown)
    if told.end is not None and told.log.finish_reason is not told.end:
        yield CheckKind.LOG, f"ended by {told.log.finish_reason!r}, not by {told.end!r}"


def _difference(other: Sequence[int], shown: Sequence[int]) -> str:
    equal = next((i for i, (a, b) in enumerate(zip(other, shown, strict=False)) if a != b), min(len(other), len(shown)))
    return f"{len(other)} tokens, of which {equal} are the client's {len(shown)}"
