"""Many edges whose verifier is killed, and replaced: no text is lost, and they do not come back all at once."""

from __future__ import annotations

from tests.simulation.storm import AWAY_S, MOST_WATCHED, PER_EDGE, play, scenario

EDGES = 12


def test_a_storm_loses_no_text() -> None:
    """All go on at the other verifier, without waiting for the one that is away."""
    assert EDGES <= MOST_WATCHED
    storm = play(scenario(EDGES, short=False))
    assert not storm.outcome.found
    assert dict(storm.outcome.ends) == {"LENGTH": EDGES * PER_EDGE}
    assert 0 < storm.back_s < AWAY_S
    assert storm.rolling_pause_s < AWAY_S


def test_where_slots_are_short_they_come_back_scattered() -> None:
    asked = scenario(EDGES, short=True)
    storm = play(asked)
    assert not storm.outcome.found
    assert dict(storm.outcome.ends) == {"LENGTH": EDGES * PER_EDGE}
    assert storm.opens > asked.sessions + asked.sessions // 2  # those of the killed one, and some of them again
    assert storm.back_s < AWAY_S + asked.queue_wait + 4
    assert 0 < storm.burst <= asked.sessions // 4
