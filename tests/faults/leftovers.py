"""Whether anything is left of what was told to end."""

from __future__ import annotations

import socket

import redis

from tests.faults.streams import LIMIT_S
from tests.orchestrator.redis_for_tests import RedisServer


def check_ports_are_taken(*addresses: str) -> None:
    """Else it would mean nothing that they are free afterwards."""
    for address in addresses:
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=LIMIT_S):
            pass


def check_ports_are_free(*addresses: str) -> None:
    for address in addresses:
        host, _, port = address.rpartition(":")
        with socket.create_server((host, int(port))):
            pass


def check_keys_expire(log: RedisServer) -> None:
    """There are keys, and each has its end."""
    with redis.Redis.from_url(log.url) as client:
        keys = list(client.scan_iter("*"))
        assert keys
        assert [key for key in keys if client.pttl(key) <= 0] == []
