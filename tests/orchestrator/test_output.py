"""A session's output: made again from its log, and for a reader that comes back, it is the text that was shown."""

from __future__ import annotations

import asyncio
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.session.output import MOST_REPORTED, PORTION, Cursor, OtherText, Output, Replay
from orchestrator.session.stats import stats_of
from specwire.core.messages import Append, Emit, EmitEnd, End, FinishReason, Outcome, SourceKind, TokenLogprobs, Verdict
from specwire.telemetry.tally import DraftCounts, SessionStats, late_counts, window_counts
from specwire.text.output import OutputText, Release
from tests.text.tokenizers_for_tests import byte_level
from tests.wait import raised

PROMPT_LENGTH = 2
STOPS = ("ab", "  ", "é – 日", "zz")
TOKENS = st.lists(st.sampled_from([*byte_level().encode("ab zaé – 日本 🙂🙃b  c").ids, 5, 200, 250]), max_size=30)
OUTCOMES = tuple(Outcome)


def outcomes_of(tokens: list[int]) -> list[Outcome]:
    return [OUTCOMES[token % len(OUTCOMES)] for token in tokens]


def scanner() -> OutputText:
    return OutputText(byte_level(), STOPS)


def emit(start: int, tokens: list[int], release: Release) -> Emit:
    shown = release.text, release.text_ends, release.released
    return Emit(PROMPT_LENGTH + start, tuple(tokens), tuple(outcomes_of(tokens)), *shown)


def logged(tokens: list[int]) -> Append:
    """What the log holds behind the prompt."""
    return Append(PROMPT_LENGTH, tuple(tokens), tuple(outcomes_of(tokens)))


class Shown:
    """An output as a driver fills it, append by append, up to a stop string; `ends`: text by tokens, at each append."""

    def __init__(self, tokens: list[int], cuts: list[int]) -> None:
        self.output, self.scanner = Output(PROMPT_LENGTH), scanner()
        self.ends = {0: ""}
        reader, text = Cursor(), ""
        for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
            release = self.scanner.push(tokens[start:end])
            kept = tokens[start : start + release.kept]
            if kept:
                self.output.add(emit(start, kept, release))
                text += self.output.since(reader).text
                self.ends[len(self.output.tokens)] = text

    def finish(self) -> None:
        withheld = self.scanner.finish()
        self.output.finish(EmitEnd(End(FinishReason.LENGTH, "", self.scanner.length), withheld))


@st.composite
def shown(draw: st.DrawFn) -> Shown:
    tokens = draw(TOKENS)
    return Shown(tokens, sorted(draw(st.lists(st.integers(0, len(tokens)), max_size=6))))


@given(shown())
def test_a_reader_goes_on_where_its_text_ended(original: Shown) -> None:
    original.finish()
    log = original.output
    restored = Output(PROMPT_LENGTH)
    replay = Replay(restored, scanner())
    asyncio.run(replay.extend(log))
    restored.finish(replay.end(FinishReason.LENGTH, original.scanner.length))
    assert (restored.text, restored.text_ends) == (log.text, log.text_ends)
    assert (restored.tokens, restored.outcomes) == (log.tokens, log.outcomes)
    for position in range(PROMPT_LENGTH, PROMPT_LENGTH + len(log.tokens) + 1):
        assert log.cursor_at(position) == restored.cursor_at(position)
    for output in (log, restored):
        for tokens, text in original.ends.items():
            cursor = output.cursor_at(PROMPT_LENGTH + tokens)
            rest = output.since(cursor).text if tokens < len(log.tokens) else ""
            assert text + rest + output.since(cursor).text == log.text


@given(shown(), st.data())
def test_what_another_owner_appends_comes_behind_what_was_shown(original: Shown, data: st.DataObject) -> None:
    known = data.draw(st.sampled_from(sorted(original.ends)))
    whole = original.output
    output = Output(PROMPT_LENGTH)
    first = scanner()
    release = first.push(whole.tokens[:known])
    if known:
        output.add(emit(0, whole.tokens[:known], release))
    replay = Replay(output, scanner())
    for end in range(known, len(whole.tokens) + 1):
        asyncio.run(replay.extend(logged(whole.tokens[:end])))
    assert (output.text, output.tokens, output.outcomes) == (whole.text, whole.tokens, whole.outcomes)


@pytest.mark.parametrize("log", [[7, 8], [7, 9, 5], []])
async def test_a_log_that_contradicts_what_was_shown_or_shrinks_is_refused(log: list[int]) -> None:
    output = Output(PROMPT_LENGTH)
    replay = Replay(output, scanner())
    for _ in range(2):
        await replay.extend(logged([7, 8, 5]))
    await raised(OtherText, Replay(output, scanner()).extend(logged(log)), "behind 2")
    await raised(OtherText, replay.extend(logged([7, 8])), "behind 5")


async def test_a_long_log_does_not_hold_up_others() -> None:
    tokens, turns = [7] * (3 * PORTION), 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    await Replay(Output(PROMPT_LENGTH), scanner()).extend(logged(tokens))
    counting.cancel()
    assert turns >= 3


# ----------------------------------------------------------------------------------------------------------------------
# A reader that comes back goes on exactly where its text ended.

DIRECT = Outcome.DIRECT


def test_a_piece_that_ends_within_an_append_has_the_text_that_others_would_release() -> None:
    """Of one append of many tokens a reader gets MOST_REPORTED, the last of which may begin a stop string."""
    (a, *_), (b, *_) = byte_level().encode("a").ids, byte_level().encode("b").ids
    letters = [a] * (MOST_REPORTED - 1) + [b, a]
    told = tuple(TokenLogprobs(-1.0) for _ in letters)
    release = OutputText(byte_level(), ("bb",)).push(letters)
    driven, elsewhere = Output(2), Output(2)
    shown = release.text, release.text_ends, release.released
    driven.add(Emit(2, tuple(letters), (DIRECT,) * len(letters), *shown, told))
    replay = Replay(elsewhere, OutputText(byte_level(), ("bb",)))
    asyncio.run(replay.extend(driven))
    first = driven.since(Cursor())
    assert len(first.tokens) == MOST_REPORTED
    rest = elsewhere.since(elsewhere.cursor_at(first.position + len(first.tokens)))
    assert first.text + rest.text == release.text == driven.text


async def test_reports_come_in_pieces_that_a_message_can_hold() -> None:
    output, count = Output(1), 2 * MOST_REPORTED + 5
    tokens, ends = tuple(range(count)), tuple(range(1, count + 1))
    told = tuple(TokenLogprobs(-float(token)) for token in tokens)
    output.add(Emit(1, tokens, (DIRECT,) * count, "x" * count, ends, ends, told))
    output.finish(EmitEnd(End(FinishReason.LENGTH, "", count), ""))
    pieces = [piece async for piece in output.follow(Cursor())]
    assert [len(piece.tokens) for piece in pieces] == [MOST_REPORTED, MOST_REPORTED, 5]
    assert tuple(each for piece in pieces for each in piece.logprobs) == told
    assert [(piece.position, len(piece.text)) for piece in pieces[1:]] == [
        (1 + MOST_REPORTED, MOST_REPORTED),
        (1 + 2 * MOST_REPORTED, 5),
    ]


# ----------------------------------------------------------------------------------------------------------------------
# A session's figures: what counts as proposed, tested and accepted, and what saved a forward.

A, R, B, D = Outcome.ACCEPTED, Outcome.RECOVERED, Outcome.BONUS, Outcome.DIRECT


def verdict(
    width: int, *outcomes: Outcome, kind: SourceKind = SourceKind.DRAFTER, source: int = 0, met: int = 0
) -> Verdict:
    return Verdict(10, (7,) * len(outcomes), outcomes, width, kind=kind, source=source, met=met)


@pytest.mark.parametrize(
    ("width", "outcomes", "counts"),
    [
        (0, (D,), (0, 0, 0)),
        (0, (A,), (1, 1, 1)),  # arrived during the forward and agreed with its only row
        (0, (R,), (1, 1, 0)),
        (3, (A, R), (3, 2, 1)),
        (3, (R,), (3, 1, 0)),
        (3, (A, A, A, B), (3, 3, 3)),
        (3, (A, A, A, A), (4, 4, 4)),
        (3, (A, A, A, R), (4, 4, 3)),
        (5, (A, A), (5, 2, 2)),  # the text's end stood in the window: what is behind it was neither tested nor refused
    ],
)
def test_draft_tokens_are_proposed_tested_and_accepted(
    width: int, outcomes: tuple[Outcome, ...], counts: tuple[int, int, int]
) -> None:
    stats = SessionStats(started=0.0)
    stats.count_verdict(verdict(width, *outcomes))
    assert stats.drafted == DraftCounts(*counts)
    assert (stats.target_forwards, stats.forwards_saved) == (1, len(outcomes) - 1)
    assert sum(stats.tested_at) == window_counts(outcomes, width).tested
    assert sum(stats.accepted_at) == window_counts(outcomes, width).accepted


def test_accepted_is_never_more_than_tested_nor_that_more_than_proposed() -> None:
    """Whatever a verifier says, of all and of each source."""
    for width in range(4):
        for length in range(5):
            for outcomes in product(Outcome, repeat=length):
                for counts in (window_counts(outcomes, width), late_counts(outcomes, width)):
                    assert 0 <= counts.accepted <= counts.tested <= counts.proposed
    with pytest.raises(ValueError, match="more accepted than tested, or more tested than proposed"):
        DraftCounts(1, 2, 1)


def test_a_head_s_tokens_have_their_own_figures_in_a_reply() -> None:
    stats = SessionStats(started=0.0)
    stats.count_verdict(verdict(4, A, R, kind=SourceKind.HEAD))
    stats.count_verdict(verdict(2, A, A, B, kind=SourceKind.HEAD))
    stats.count_verdict(verdict(1, R, kind=SourceKind.NGRAM))
    stats.outcomes.update((A, R, A, A, B, R))
    told = stats_of(stats, 3)
    assert (told.proposed_head, told.tested_head, told.accepted_head) == (6, 4, 3)
    assert (told.proposed_ngram, told.tested_ngram, told.accepted_ngram) == (1, 1, 0)
    assert (told.proposed, told.tested, told.accepted) == (7, 5, 3)
    assert not told.drafters


def test_a_drafter_has_its_windows_and_its_tokens_that_came_late() -> None:
    stats = SessionStats(started=0.0)
    drafters = [stats.of_drafter(source, "a model") for source in (1, 2, 3)]
    stats.count_verdict(verdict(2, A, A, A, source=1, met=2))
    assert [each.drafts for each in drafters] == [DraftCounts(2, 2, 2), DraftCounts(1, 1, 1), DraftCounts()]
    stats.count_verdict(verdict(2, A, R, kind=SourceKind.NGRAM, source=0, met=0))
    assert sum(each.drafts.proposed for each in drafters) == stats.drafts[SourceKind.DRAFTER].proposed == 3


def test_of_what_others_decided_only_what_was_tested_is_known() -> None:
    """A session that was taken over: its output tells how tokens were decided, and so how many forwards ended."""
    stats = SessionStats(started=0.0)
    stats.count_verdict(verdict(3, A, R))
    stats.outcomes.update((A, R))
    stats.count_all((A, A, A, B, R, D, A, R))
    told = stats_of(stats, 3)
    assert (told.accepted, told.tested, told.proposed) == (4, 6, 3 + 4)
    assert told.tested == told.accepted + told.recovered
    assert (told.target_forwards, told.forwards_saved) == (1 + 3, 1)
