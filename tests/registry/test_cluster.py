"""The registry in a cluster: its keys lie where they lie, and a server that is lost takes its share with it."""

from __future__ import annotations

import pytest
from redis.crc import key_slot

from specwire.registry.directory import INDEX, PREFIX, Directory, RegistryUnavailable, new_id
from specwire.registry.entry import Role, ServiceEntry
from tests.orchestrator.redis_groups import SLOTS, client_of, cluster, cluster_url
from tests.wait import until

TTL_S = 600.0


async def test_services_are_found_wherever_their_keys_are() -> None:
    with cluster() as nodes:
        directory = Directory.at(cluster_url(nodes), 2.0)
        entries = {ServiceEntry(new_id(), Role.VERIFIER, f"10.0.0.1:{port}") for port in range(1, 21)}
        for entry in entries:
            await directory.put(entry, TTL_S)
        assert set((await directory.listing()).entries) == entries
        await directory.note_affinity({str(number): "10.0.0.1:1" for number in range(20)})
        assert {await directory.affinity_of(str(number)) for number in range(20)} == {"10.0.0.1:1"}
        for node in nodes:
            with client_of(node) as client:
                keys = client.keys(f"{PREFIX}*")
                assert 0 < len(keys) < 20
                assert all(client.pttl(key) > 0 for key in client.keys("*"))

        lost = next(node for node in nodes if not holds_index(nodes.index(node)))
        lost.stop()
        with pytest.raises(RegistryUnavailable, match="does not answer"):
            await directory.listing()  # a part of the truth would look like services that have gone
        lost.start()
        await until(lambda: there(directory, entries))
        await directory.close()


def holds_index(node: int) -> bool:
    """The first node has the first half of the slots."""
    return (key_slot(INDEX.encode()) < SLOTS // 2) == (node == 0)


async def there(directory: Directory, entries: set[ServiceEntry]) -> bool:
    """Once the server is back, whoever it has lost says again that it is there."""
    try:
        for entry in entries:
            await directory.put(entry, TTL_S)
        return set((await directory.listing()).entries) == entries
    except RegistryUnavailable:
        return False
