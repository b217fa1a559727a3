"""What runners-up of a head would gain: windows of several paths over ranks, and ranks that are the head's own."""

from __future__ import annotations

import pytest

from bench.branching import head_windows
from bench.branching.head_windows import DEPTH, MISSED, accepted, likeliest, ranked, tokens_per_forward, window, written
from bench.harness.record import prompts_of
from demo_pair import HEAD, TARGET
from specwire.core.draft import HeadRequest
from specwire.lm import Feed, linear, load_model
from specwire.lm.heads.slots import HeadedModel

RIGHT, SECOND, WRONG = (0, 0, 0), (1, 0, 0), (MISSED, 0, 0)


def test_a_window_is_a_chain_with_runners_up_of_its_first_guesses() -> None:
    assert window(2) == {(0,), (0, 0)}
    assert window(3, 2, 1) == {(0,), (0, 0), (0, 0, 0), (1,), (2,), (0, 1)}


@pytest.mark.parametrize(
    ("ranks", "by_chain", "by_tree"),
    [(RIGHT, 2, 2), (SECOND, 0, 1), (WRONG, 0, 0), ((0, 1, 0), 1, 2), ((0, MISSED, 0), 1, 1), ((2, 0, 0), 0, 0)],
)
def test_a_path_is_accepted_as_far_as_it_is_tested(ranks: tuple[int, ...], by_chain: int, by_tree: int) -> None:
    assert (accepted(window(2), ranks), accepted(window(2, 1, 1), ranks)) == (by_chain, by_tree)


def test_each_forward_begins_where_the_one_before_ended() -> None:
    """Of five places a chain of two decides three and one, then one; with a runner-up three, then two."""
    places = [RIGHT, WRONG, WRONG, SECOND, WRONG]
    assert tokens_per_forward(window(2), [places]) == pytest.approx((3 + 1 + 1) / 3)
    assert tokens_per_forward(window(2, 1), [places, []]) == pytest.approx((3 + 2) / 2)


def test_the_likeliest_paths_are_those_that_were_right_most_often() -> None:
    places = [RIGHT, RIGHT, SECOND, SECOND, (1, 1, 0), WRONG]
    assert likeliest([places], 2, 3) == {(1,), (0,), (0, 0)}
    assert likeliest([places], 1, 3) == {(1,), (0,)}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_ranks_are_of_what_the_head_drafts_when_it_serves(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first candidate behind right ones is the token that it drafts, with its weights as they are."""
    monkeypatch.setattr(linear, "LEAST_ROUNDED", 1 << 30)
    prompt = prompts_of(TARGET)[0]
    text = written([prompt], 24, temperature)[0]
    (places,) = ranked([text], [len(prompt)], temperature)
    assert len(places) == len(text) - len(prompt) - DEPTH
    lm = load_model(str(TARGET), slots=1, dtype="float32", heads=str(HEAD), threads=1)
    assert isinstance(lm, HeadedModel)
    lm.forward([Feed(0, 0, prompt, 1)])
    for length, ranks in enumerate(places, len(prompt) + 1):
        sampling = head_windows.sampling_of(0, temperature)
        (drafted,) = lm.draft([HeadRequest(0, text[:length], sampling, DEPTH)])
        right = [token == text[length + at] for at, token in enumerate(drafted)]
        first_wrong = (*right, False).index(False)
        assert [rank == 0 for rank in ranks[: first_wrong + 1]] == right[: first_wrong + 1]
        lm.forward([Feed(0, length - 1, [text[length - 1]], 1)])


def test_tables_are_printed_and_mistakes_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert head_windows.main(["--prompts", "2", "--tokens", "16"]) == 0
    printed = capsys.readouterr().out
    for words in ("right by rank", "runners-up at depth 1", "its tokens in V(1)"):
        assert words in printed
    assert head_windows.main(["--prompts", "0"]) == 2
    assert head_windows.main(["--temperature", "nan"]) == 2
    assert head_windows.main(["--prompts", "1", "--tokens", "3"]) == 2
    said = capsys.readouterr().err
    for words in ("prompts: must be at least 1", "temperature: must be 0 or more", "tokens: must be more than 5"):
        assert words in said
