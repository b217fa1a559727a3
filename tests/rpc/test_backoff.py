"""Waits grow, are scattered, and start anew."""

from __future__ import annotations

from specwire.rpc.channel import Backoff


def test_waits_double_up_to_a_limit_and_are_scattered_over_their_upper_half() -> None:
    backoff = Backoff(0.1, 1.0)
    for most in (0.1, 0.2, 0.4, 0.8, 1.0, 1.0):
        assert most / 2 <= backoff.next() <= most
    backoff.reset()
    assert 0.05 <= backoff.next() <= 0.1


def test_two_who_lost_the_same_peer_do_not_come_back_together() -> None:
    waits = {Backoff(1.0, 2.0).next() for _ in range(10)}
    assert len(waits) > 1
