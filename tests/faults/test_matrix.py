"""Every party killed, stopped, ended, restarted; every link cut, held, reset, while text streams: it stays the same."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.store import StoredSession
from specwire.core.limits import FinishReason
from tests.faults.matrix import CELLS, LINK_FAULTS, LINKS, PARTIES, PARTY_FAULTS, Cell, shown_by
from tests.faults.place import Place, place
from tests.faults.scene import DRAFT, TARGET, Scene
from tests.faults.streams import Stream

HERE = Path(__file__).resolve().parent
PARAMETERS = [pytest.param(cell, id=cell.name, marks=() if cell.quick else pytest.mark.whole_matrix) for cell in CELLS]


@pytest.fixture(scope="module")
def played() -> Iterator[Place]:
    """Give the processes, which are gone afterwards."""
    with place(TARGET, DRAFT) as running:
        yield running


@pytest.mark.parametrize("cell", PARAMETERS)
def test_a_fault(played: Place, cell: Cell) -> None:
    """No token is lost, none comes twice, each is the target's; the log says the same."""
    scene = Scene(played, cell)
    scene.play()
    for stream, expected, fence in zip(scene.streams, scene.expected(), scene.fences, strict=True):
        assert stream.tokens == expected
        assert stream.error is None
        log = played.log(stream.session_id)
        assert list(log.tokens[: len(expected)]) == expected
        assert log.fence > fence if is_claimed(cell) else log.fence == fence or may_be_claimed(cell)
        if not scene.open_ended:
            assert_ended(stream, log)
    for service in played.services:
        assert "Traceback" not in service.said()


def assert_ended(stream: Stream, log: StoredSession) -> None:
    """As asked, with the text that its tokens make; the log says no less and no more."""
    assert stream.finished is not None
    assert stream.finished.reason is log.reason is FinishReason.LENGTH
    assert stream.finished.stats.output_tokens == len(stream.tokens)
    assert stream.text == " ".join(map(str, stream.tokens))
    assert (list(log.tokens), list(log.outcomes)) == (stream.tokens, stream.outcomes)


def is_claimed(cell: Cell) -> bool:
    """Another orchestrator, or the one that has come back, goes on with the session."""
    return cell.where == "orchestrator" or (cell.where, cell.fault) == ("client-orchestrator", "cut")


def may_be_claimed(cell: Cell) -> bool:
    """While its client hears nothing, a session goes on where it is, and may end before it is asked for elsewhere."""
    return (cell.where, cell.fault) == ("client-orchestrator", "stall")


# The table


def test_the_matrix_is_whole() -> None:
    wanted = {*itertools.product(PARTIES, PARTY_FAULTS), *itertools.product(LINKS, LINK_FAULTS)}
    assert sorted((cell.where, cell.fault) for cell in CELLS) == sorted(wanted)


def test_every_row_and_every_fault_is_in_the_short_run() -> None:
    quick = [cell for cell in CELLS if cell.quick]
    assert {cell.where for cell in quick} == {*PARTIES, *LINKS}


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_the_tests_that_it_names_are_there(cell: Cell) -> None:
    for test in shown_by(cell):
        file, _, function = test.partition("::")
        folder = HERE.parent if "/" in file else HERE
        assert f"def {function.partition('[')[0]}(" in (folder / file).read_text()
