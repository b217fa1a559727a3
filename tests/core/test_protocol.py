"""Every test vector and every table of PROTOCOL.md is what the core does."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from google.protobuf.descriptor import Descriptor

from scripts.figures import __main__ as figures
from specwire.core.law.acceptance import choose
from specwire.core.law.noise import NoiseStream, gumbel, philox4x32, uniform_integers
from specwire.core.law.sampling import History, Sampling
from specwire.core.messages import Outcome
from specwire.core.session import TRANSITIONS, State
from specwire.core.text import Tree, extend_hash, hash_of
from specwire.core.verify.chains import Offer
from specwire.rpc.convert import proposal_from_wire, proposal_to_wire
from specwire.v1 import common_pb2, draft_pb2, generation_pb2, verify_pb2
from tests.fuzz.numbers import EXTREMES

PAGE = (Path(__file__).resolve().parents[2] / "proto" / "PROTOCOL.md").read_text()
LOGITS = [1.0, 0.5, 0.0, -0.5]


def rows_after(line: str, page: str = PAGE) -> list[list[str]]:
    """The cells of the first table after a line."""
    lines = page.split(line, 1)[1].splitlines()
    start = next(index for index, text in enumerate(lines) if text.startswith("|"))
    stop = next((index for index in range(start, len(lines)) if not lines[index].startswith("|")), len(lines))
    return [[cell.strip() for cell in text.strip("|").split("|")] for text in lines[start + 2 : stop]]


def vectors(name: str) -> list[list[str]]:
    return rows_after(f"<!-- vectors: {name} -->")


def words(cell: str) -> tuple[int, ...]:
    return tuple(int(word, 16) for word in cell.split())


@pytest.mark.parametrize(("tokens", "value"), vectors("hash"))
def test_hash(tokens: str, value: str) -> None:
    assert f"{hash_of(int(token) for token in tokens.split()):016x}" == value


@pytest.mark.parametrize("row", vectors("resuming"))
def test_resuming(row: list[str]) -> None:
    prompt, received = ([int(token) for token in cell.split()] for cell in row[:2])
    value = hash_of(prompt)
    assert f"{value:016x}" == row[2]
    for token in received:
        value = extend_hash(value, token)
    assert (str(len(prompt) + len(received)), f"{value:016x}") == (row[3], row[4])


@pytest.mark.parametrize(("counter", "key", "output"), vectors("philox"))
def test_philox(counter: str, key: str, output: str) -> None:
    c0, c1, c2, c3 = words(counter)
    k0, k1 = words(key)
    assert philox4x32((c0, c1, c2, c3), (k0, k1)) == words(output)


@pytest.mark.parametrize("row", vectors("noise"))
def test_noise(row: list[str]) -> None:
    seed, choice, position, token, stream, integer = (int(cell) for cell in row[:6])
    assert int(uniform_integers(seed, choice, position, np.array(token), NoiseStream(stream))) == integer
    if row[6]:
        assert float(gumbel(seed, choice, position, np.array(token))) == pytest.approx(float(row[6]), rel=1e-14)
    else:
        assert stream != NoiseStream.GUMBEL


@pytest.mark.parametrize("row", vectors("coupled"))
def test_coupled(row: list[str]) -> None:
    sampling = Sampling(float(row[0]), int(row[1]), float(row[2]), int(row[3]), int(row[4]))
    assert [choose(LOGITS, position, sampling) for position in range(4, 12)] == [int(token) for token in row[5].split()]


@pytest.mark.parametrize("row", vectors("options"))
def test_options(row: list[str]) -> None:
    temperature, min_p, repetition, presence, frequency = map(float, row[:5])
    bias = tuple((int(token), float(value)) for token, _, value in (pair.partition("=") for pair in row[5].split()))
    sampling = Sampling(
        temperature,
        seed=7,
        min_p=min_p,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=bias,
    )
    history, output = History([0, 0, 1, 3]), []
    for position in range(4, 12):
        output.append(choose(LOGITS, position, sampling, history.seen()))
        history.extend(output[-1:])
    assert output == [int(token) for token in row[6].split()]


@pytest.mark.parametrize("end", range(1, len(vectors("trees")) + 1))
def test_trees(end: int) -> None:
    """The pieces up to each row, against the last row's nodes."""
    found = Tree(0, int(vectors("trees")[0][0]))
    for base, offset, tokens, distances, nodes in vectors("trees")[:end]:
        wire = common_pb2.Proposal(
            base=int(base),
            offset=int(offset),
            tokens=[int(token) for token in tokens.split()],
            parents=[int(distance) for distance in distances.split()],
        )
        piece = proposal_from_wire(wire)
        assert proposal_to_wire(piece, 0).parents == wire.parents
        numbers = range(piece.offset, piece.offset + len(piece.tokens))
        parents = piece.parents or [number - 1 for number in numbers]
        before = set(found.nodes)
        found.extend(piece.tokens, parents)
        added = [node for number, node in found.nodes.items() if number not in before]
        shown = ", ".join(f"{node.number}@{node.position} behind {node.parent}" for node in added)
        assert shown == nodes


def test_every_offer_and_every_outcome_has_its_row() -> None:
    offers = [row[0].replace(" ", "_").replace("-", "_") for row in rows_after("What becomes of a proposal")]
    assert sorted(offers) == sorted(Offer)
    outcomes = [row[0] for row in rows_after("each with its outcome:")]
    assert outcomes == [outcome.name.lower() for outcome in Outcome]


def test_the_table_of_states_is_the_core_s() -> None:
    rows = {row[0]: row[1:] for row in rows_after("<!-- states: written by scripts/figures -->")}
    assert rows.keys() == {event.__name__ for event in TRANSITIONS}
    for event, transitions in TRANSITIONS.items():
        cells = {state: rows[event.__name__][index] for index, state in enumerate(State)}
        for state, shown in cells.items():
            assert set(filter(None, shown.split(" or "))) == set(transitions.get(state, ()))


def test_the_drawing_is_the_session_s() -> None:
    drawing = PAGE.split("## 10.", 1)[1].split("What each event", 1)[0]
    for transition in ("VerifierReady", "VerifierOpened", "VerifierLost", "OwnerLost"):
        assert transition in drawing
    assert all(state in drawing for state in State)


def drifted() -> str:
    return PAGE.replace("| opening or waiting |", "| ended |", 1).replace("| waiting or opening |", "| ended |", 1)


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "PROTOCOL.md"
    path.write_text(drifted())
    monkeypatch.setitem(figures.PLACES, "states", path)
    return path


def test_check_reports_drift_and_write_repairs_it(page: Path) -> None:
    assert page.read_text() != PAGE
    assert figures.main(["--check"]) == 1
    assert page.read_text() == drifted()
    assert figures.main(["--write"]) == 0
    assert figures.main(["--check"]) == 0
    assert page.read_text() == PAGE


def test_a_page_without_markers_is_an_error(page: Path) -> None:
    page.write_text("nothing here")
    with pytest.raises(ValueError, match="markers"):
        figures.main(["--write"])


ROOTS = (
    verify_pb2.ConnectVerifyRequest,
    verify_pb2.ConnectVerifyResponse,
    verify_pb2.ScoreRequest,
    verify_pb2.ScoreResponse,
    draft_pb2.JoinRequest,
    draft_pb2.JoinResponse,
    generation_pb2.GenerateRequest,
    generation_pb2.WatchRequest,
    generation_pb2.ScoreTextRequest,
)


def test_every_number_that_a_peer_or_a_client_sends_has_a_range() -> None:
    """Of each message that is sent to a service, or by a peer to an orchestrator; once, and nothing else is named."""
    found = {
        f"{kind.name}.{field.name}"
        for root in ROOTS
        for kind in parts_of(cast(Descriptor, root.DESCRIPTOR), {})
        for field in kind.fields
        if field.type in EXTREMES
    }
    table = rows_after("<!-- numbers: every numeric field that a peer or a client sends -->")
    told = [name.strip("` ") for fields, _, _ in table for name in fields.split(",")]
    assert sorted(told) == sorted(found)
    assert all(span and beyond for _, span, beyond in table)


def parts_of(kind: Descriptor, known: dict[str, Descriptor]) -> Iterable[Descriptor]:
    """The kind, and those of all that it may hold."""
    if kind.full_name not in known:
        known[kind.full_name] = kind
        for field in kind.fields:
            if field.message_type is not None:
                parts_of(field.message_type, known)
    return known.values()
