"""An orchestrator's options: what does not go together, or is out of range, is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from bench.harness.certificates import Authority
from orchestrator.options import LONGEST_S, MOST_DRAFTERS, OrchestratorOptions
from orchestrator.server import options_of
from orchestrator.tenants import Access
from specwire.options import VERIFIER_WAIT_S
from specwire.registry.options import CloudOptions, RegistryOptions
from specwire.rpc.keys import Keys
from tests.options import parsed

TOKEN = "the-token-of-somebody"
KEYS = Keys({TOKEN: "somebody"})
CA = Authority()
OPEN = "0.0.0.0:0"
SHOWN = {"tls": CA.server(client_ca=CA)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"durability": "redis-fsync"}, "durability: redis-fsync needs a Redis as redis-url"),
        ({"retention": 0.0}, "retention: must be positive, not 0.0"),
        ({"retention": 2 * LONGEST_S}, "retention: must be at most"),
        ({"sse_keep_alive": 0.0}, "sse-keep-alive: must be above 0 and at most"),
        *(({"verifier_wait": wait}, "verifier_wait: must be positive") for wait in (0.0, -1.0, float("nan"))),
        ({"verifier_wait": float("inf")}, "verifier_wait: must be at most"),
        *(
            ({"drafters_per_session": count}, f"drafters-per-session: must be from 1 to 8, not {count}")
            for count in (0, -1, MOST_DRAFTERS + 1)
        ),
        ({"access": Access(KEYS), "accept_drafters": True}, "accept-drafters: with --api-keys it needs --drafter-keys"),
        ({"access": Access(drafter_keys=KEYS)}, "--drafter-keys: needs --accept-drafters"),
        ({"peer_token": TOKEN}, "token: is not sent to far.example:1 unencrypted: give --tls or --tls-ca"),
        ({"peer_token": TOKEN, "verifiers": (), "cloud": CloudOptions("far:1")}, "token: "),
        ({"cloud": CloudOptions("h:1"), "registration": RegistryOptions("redis://h:1")}, "cloud: and --registry"),
        (
            {"listen": OPEN, "tls": CA.server(), "accept_drafters": True},
            "accept-drafters: a drafter is told every prompt.*--tls-client-ca",
        ),
        *(
            ({**shown, "drafter_names": ("a",)}, "drafter-name: is read in certificates")
            for shown in ({"accept_drafters": True}, {"accept_drafters": True, "tls": CA.server()}, SHOWN)
        ),
    ],
)
def test_what_is_wrong_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        OrchestratorOptions(**{"verifiers": ("far.example:1",), **options})


@pytest.mark.parametrize("more", [SHOWN, {"insecure": True}, {"listen": "localhost:0"}])
def test_who_lets_drafters_in_knows_who_they_are_or_that_nobody_is_far(more: dict[str, Any]) -> None:
    OrchestratorOptions(**{"verifiers": ("v:1",), "listen": OPEN, "accept_drafters": True, **more})


def test_the_command_line_says_how_long_things_are_kept_and_waited_for() -> None:
    def read(*words: str) -> OrchestratorOptions:
        return options_of(parsed("orchestrate", "--verifier", "127.0.0.1:1", *words))

    words = ("--redis-url", "redis://host", "--durability", "redis-wait:2", "--retention", "0.5")
    options = read(*words, "--verifier-wait", "600")
    assert (options.redis_url, options.durability, options.retention) == ("redis://host", "redis-wait:2", 0.5)
    assert options.verifier_wait == 600.0
    assert (read().durability, read().verifier_wait) == ("", VERIFIER_WAIT_S)
