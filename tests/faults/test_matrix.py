"""Every party killed, stopped, ended, restarted; every link cut, held, reset, while text streams: it stays the same."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.faults.matrix import (
    CELLS,
    CLIENTS_LINE,
    HTTP_LINE,
    LINK_FAULTS,
    LINKS,
    PARTIES,
    PARTY_FAULTS,
    QUICK,
    QUICK_SILENT,
    Cell,
    held_s,
    shown_by,
)
from tests.faults.parts import ServiceProcess
from tests.faults.place import Place, place
from tests.faults.scene import DRAFT, TARGET, Manner, Scene, addresses, serving

HERE = Path(__file__).resolve().parent
# On a busy machine the automatic plan may be right to do without a drafter that starts slowly, for a whole text; cells
# about drafters hurt one while it drafts.
ALWAYS = "stream:1,32"
PARAMETERS = [
    pytest.param(cell, id=cell.name, marks=() if (cell.where, cell.fault) in QUICK else pytest.mark.whole_matrix)
    for cell in CELLS
]


@pytest.fixture(scope="module")
def running() -> Iterator[Place]:
    """Give the processes, which are gone afterwards."""
    with place(TARGET, DRAFT, plan=ALWAYS) as present:
        yield present


@pytest.fixture
def played(running: Place) -> Place:
    """Give the place with all its parts alive."""
    running.mend()
    return running


@pytest.mark.parametrize("cell", PARAMETERS)
def test_a_fault(played: Place, cell: Cell) -> None:
    check(played, cell)


def test_two_that_nobody_hears_of(played: Place) -> None:
    """At the same time: one stops the first orchestrator, the other a line of another one."""
    cells = [cell for cell in CELLS if (cell.where, cell.fault) in QUICK_SILENT]
    with ThreadPoolExecutor(len(QUICK_SILENT)) as pool:
        assert len(list(pool.map(check, itertools.repeat(played), cells))) == len(QUICK_SILENT)


def check(played: Place, cell: Cell) -> None:
    """No token is lost, none comes twice, each is the target's; the log says the same."""
    # A stop that is to be noticed lasts for longer than it takes to notice: the session is claimed each time.
    manner = Manner(stopped_s=held_s(cell)) if is_claimed(cell) else Manner()
    scene = Scene(played, cell, manner=manner)
    scene.play()
    scene.check_pause()
    for stream, expected, fence in zip(scene.streams, scene.expected(), scene.fences, strict=True):
        assert stream.tokens == expected
        assert stream.error is None
        log = played.log(stream.session_id)
        assert list(log.tokens[: len(expected)]) == expected
        assert log.fence > fence if is_claimed(cell) else log.fence == fence or may_be_claimed(cell)
        if not scene.left:
            stream.check_whole(expected)
            stream.check_logged(log)
    for service in played.services:
        assert "Traceback" not in service.said()


def is_claimed(cell: Cell) -> bool:
    """Another orchestrator, or the one that has come back, goes on with the session."""
    return cell.where == "orchestrator" or ("client" in cell.where and cell.fault == "cut")


def may_be_claimed(cell: Cell) -> bool:
    """While its client hears nothing, a session goes on where it is, and may end before it is asked for elsewhere."""
    return "client" in cell.where and cell.fault == "stall"


def test_only_cells_about_drafters_go_by_a_fixed_plan(running: Place) -> None:
    for cell in CELLS:
        texts_at = set(addresses(running, cell))
        called = [each for each in running.orchestrators if texts_at & reached_at(running, each)]
        assert serving(running, cell) in called, cell.name
        assert [ALWAYS in each.command for each in called] == [cell.about_drafter] * len(called), cell.name


def reached_at(running: Place, orchestrator: ServiceProcess) -> set[str]:
    """Its own addresses, and the relays to it."""
    relayed = (CLIENTS_LINE, HTTP_LINE) if orchestrator is running.apart else ()
    return {orchestrator.address, orchestrator.http, *(running.lines[where].address for where in relayed)}


# The table


def test_the_matrix_is_whole() -> None:
    wanted = {*itertools.product(PARTIES, PARTY_FAULTS), *itertools.product(LINKS, LINK_FAULTS)}
    assert sorted((cell.where, cell.fault) for cell in CELLS) == sorted(wanted)


def test_every_place_and_every_fault_is_in_the_short_run() -> None:
    quick = {*QUICK, *QUICK_SILENT}
    assert {where for where, _ in quick} == {*PARTIES, *LINKS}
    assert {fault for _, fault in quick} == {*PARTY_FAULTS, *LINK_FAULTS}
    assert all(not cell.silent for cell in CELLS if (cell.where, cell.fault) in QUICK)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_the_tests_that_it_names_are_there(cell: Cell) -> None:
    for test in shown_by(cell):
        file, _, function = test.partition("::")
        folder = HERE.parent if "/" in file else HERE
        assert f"def {function.partition('[')[0]}(" in (folder / file).read_text()
