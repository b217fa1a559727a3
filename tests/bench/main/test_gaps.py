"""Durations come out of instants, and only out of steps that followed one another."""

from __future__ import annotations

import pytest

from bench.harness.runs import Arrival, Sample
from bench.main.gaps import BETWEEN, DELIVERY, between_forwards, delivery, figures
from tests.bench.harness.made_rows import arrival, run


def test_the_way_to_the_client_has_four_parts() -> None:
    (parts,) = delivery(run(1.0, arrivals=[arrival(7)]))
    assert parts == pytest.approx({"verifier, gRPC": 1, "log": 2, "orchestrator": 3, "gRPC, client": 4, "total": 10})


def test_a_gap_is_split_by_what_the_step_before_spent_on_choosing() -> None:
    (parts,) = between_forwards(run(1.0, arrivals=[arrival(7, choose_us=200), arrival(8, gap_us=500)]))
    assert parts == pytest.approx({"choosing tokens": 0.2, "deciding, scheduling": 0.3, "total": 0.5})


def test_steps_apart_and_chunks_without_timings_have_no_gap() -> None:
    assert not list(between_forwards(run(1.0, arrivals=[arrival(7), arrival(9), Arrival(1, 0)])))
    assert not list(delivery(run(1.0, arrivals=[Arrival(1, 0)])))


def test_medians_are_taken_over_repeats() -> None:
    samples = [
        Sample(repeat, 0, "d", run(1.0, arrivals=[arrival(1), arrival(2, gap_us=gap_us)]))
        for repeat, gap_us in enumerate((300, 400, 900))
    ]
    totals = {figure.path: figure for figure in figures(samples) if figure.part == "total"}
    assert totals[BETWEEN].p50.value == pytest.approx(0.4)
    assert totals[BETWEEN].p50.high == pytest.approx(0.9)
    assert totals[BETWEEN].count == 3
    assert totals[DELIVERY].count == 6
