"""A registry in a Redis that speaks TLS only, to who shows a certificate."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.harness.certificates import Authority
from specwire.registry.directory import Directory, RegistryUnavailable, new_id
from specwire.registry.entry import Role, ServiceEntry
from tests.orchestrator.redis_for_tests import RedisServer
from tests.orchestrator.redis_tls import encrypted, url_of


async def test_who_shows_a_certificate_is_let_in(tmp_path: Path) -> None:
    ours, stranger = Authority(), Authority("stranger")
    entry = ServiceEntry(new_id(), Role.VERIFIER, "127.0.0.1:1")
    with RedisServer() as server, encrypted(server, ours, tmp_path, mutual=True) as address:
        directory = Directory.at(url_of(address, ours, tmp_path, shown=ours), 5.0)
        await directory.put(entry, 60.0)
        assert (await directory.listing()).entries == (entry,)
        await directory.close()
        for shown in (None, stranger):
            lacking = Directory.at(url_of(address, ours, tmp_path, shown=shown), 5.0)
            with pytest.raises(RegistryUnavailable):
                await lacking.listing()
            await lacking.close()
